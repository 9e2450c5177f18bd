"""The route `/v1/completions`: texts or token ids as they are, without a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.http.errors import check_count, wrong
from common.json_text import convert_fields
from serving.completion import Choice, Piece
from serving.endpoints import ServedModel, TextEndpoint
from serving.formatter import ResponseFormatter
from serving.http.schema import CompletionFields
from serving.messages import Ready
from serving.parsed import ParsedRequest


class CompletionFormatter(ResponseFormatter):
    """Formats the response to one request of `/v1/completions`, streamed or whole."""

    object = chunk_object = "text_completion"

    def chunk(self, choice: Choice, piece: Piece, last: bool) -> bytes:
        """Return the server-sent event, as bytes, for `piece`, the next text of the completion `choice`.

        last: the completion has ended, and the event says why.
        """
        fields = self.shape(choice, piece.text) | self.details(choice, piece)
        return self.event(choice, fields, choice.reason if last else None)

    def shape(self, choice: Choice, text: str) -> dict[str, Any]:
        """Return the field `{"text": text}`, for a chunk or for a whole response; `choice` is not used."""
        return {"text": text}


class CompletionEndpoint(TextEndpoint):
    """The route `/v1/completions`: continues one prompt or several, given as text or token ids."""

    kind = CompletionFields
    source, prefix = "prompt", "cmpl"
    formatter = CompletionFormatter

    def read(self, fields: Mapping[str, Any], ready: Ready) -> ParsedRequest:
        """Return a request whose prompts are the field `prompt`: a text, token ids, or a list of these.

        fields: the decoded JSON body. ready: the engine's sizes. Sampling settings (`params`) are not set
            yet.
        """
        request = self.model.begin(fields, ready, self.source)
        request.default_tokens = 16  # OpenAI's
        given = convert_fields(CompletionFields, fields)
        self.read_fields(request)
        encode_prompts(self.model, request, given.prompt)
        return request


def encode_prompts(model: ServedModel, request: ParsedRequest, given: Any) -> None:
    """Set `request.prompts`, a list of token ids for each prompt, from the value of the field `prompt`.

    model: the served one, for its tokenizer and limits. given: a text, token ids, or a list of texts or of
        lists of token ids.

    Raises:
        ApiError: a prompt has the wrong type or is too long.
    """
    if not given:
        raise wrong("prompt", "prompt is empty, but must have at least 1 token")
    if isinstance(given, list) and len({*map(type, given)}) > 1:
        raise wrong(
            "prompt", "prompt is a mixed list, but must hold only texts, token ids or lists"
        )
    if isinstance(given, str) or isinstance(given[0], int):
        given = [given]
    else:
        request.listed = True
    check_count("prompt", len(given), model.limits.max_choices, "prompts")
    if isinstance(given[0], str):
        for request.place, text in enumerate(given):
            model.check_length(request, len(text))
        special = request.generation.add_special_tokens is not False
        given = [model.tokenizer.encode(text, special) for text in given]
    request.prompts = given
