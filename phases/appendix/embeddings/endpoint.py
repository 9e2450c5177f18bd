"""Embeddings routes: OpenAI's `/v1/embeddings`, and Ollama's `/api/embed`.

https://platform.openai.com/docs/api-reference/embeddings, https://docs.ollama.com/api/embed
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from common.http.errors import ApiError, ErrorForm, wrong
from common.json_text import convert_fields, encode_json
from phases.appendix.api.scheduling import SchedulingFields, SchedulingHandler
from phases.appendix.embeddings.note_kinds import MEAN
from phases.appendix.protocols.ollama import check_model, error_form, untagged
from phases.appendix.protocols.translation import renamed
from serving.completion import Choice, ChoiceGroup, Piece
from serving.endpoints import COPIED, ServedModel
from serving.http.request import EVENTS, HttpRequest
from serving.http.schema import GenerationFields
from serving.messages import Ready
from serving.parsed import ParsedRequest
from serving.prompts import encode_prompts

WARNING = (
    b"means of the last hidden states of a generative model, which was not trained to compare texts: "
    b"for a search take an embedding model"
)


class EmbeddingFields(Struct, kw_only=True):
    """Body of OpenAI's `POST /v1/embeddings`: texts or token ids, and how vectors are written."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = None
    stream: Literal[False] | None = False


class EmbedFields(Struct, kw_only=True):
    """Body of Ollama's `POST /api/embed`: one or more texts, and options."""

    model: str | None = None
    input: str | list[str] | None = None
    dimensions: int | None = None
    keep_alive: Any = None
    options: dict[str, Any] | None = None


@dataclass
class Vectors:
    """Formats the response of an embeddings request: a vector of length 1 for each input.

    model: its name in the response. ours: True: in OpenAI's form; False: in Ollama's. coded: whether vectors
        are base64 instead of lists.
    dimensions: the size of vectors that the client expects, which must be the model's; None: any.
    """

    headers = EVENTS

    model: str
    ours: bool
    dimensions: int | None
    coded: bool

    def vector(self, choice: Choice) -> Any:
        """Return the vector of one input: a list of floats, or the base64 text of its float32 bytes.

        choice: the input's completion, of which only the embedding is used.

        Raises:
            ApiError: the engine computes no embeddings, or the client expects another size of vectors.
        """
        if not choice.notes[MEAN]:
            raise ApiError(
                400, "this engine gives no embeddings: it must be of phase 05 or later"
            )
        (data,) = choice.notes[MEAN]
        size = len(data) // 4
        if self.dimensions not in (None, size):
            words = f"dimensions is {self.dimensions}, but must be {size}, the model's own"
            raise wrong("dimensions", words)
        return (
            base64.b64encode(data).decode()
            if self.coded
            else np.frombuffer(data, np.float32).tolist()
        )

    def body(self, group: ChoiceGroup) -> bytes:
        """Return the whole response as JSON; `group` has one completion for each input."""
        vectors = [self.vector(choice) for choice in group.choices]
        tokens = group.prompt_tokens
        if not self.ours:
            found = {"model": self.model, "embeddings": vectors, "prompt_eval_count": tokens}
            return encode_json(found | {"total_duration": 0, "load_duration": 0})
        data = [
            {"object": "embedding", "embedding": vector, "index": index}
            for index, vector in enumerate(vectors)
        ]
        used = {"prompt_tokens": tokens, "total_tokens": tokens}
        return encode_json(
            {"object": "list", "data": data, "model": self.model, "usage": used}
        )

    def chunk(self, choice: Choice, piece: Piece, last: bool) -> bytes:
        """Raise `NotImplementedError`: embeddings are not streamed."""
        raise NotImplementedError

    end = body


class Embeddings:
    """The endpoint of `/v1/embeddings` or `/api/embed`: each input becomes a prompt.

    A vector is the mean of a prompt's hidden states, scaled to length 1.

    ours: True: OpenAI's route; False: Ollama's.
    """

    threaded = False
    source = "input"

    def __init__(self, model: ServedModel, *, ours: bool) -> None:
        self.model = model
        self.ours = ours
        self.kinds: Sequence[type[Struct]] = [
            EmbeddingFields if self.ours else EmbedFields,
            GenerationFields,
            SchedulingFields,
        ]
        names = {"prompt": self.source, "n": self.source}
        self.form = ErrorForm(renamed(names)) if ours else error_form(names)

    def loads(self, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return Ollama's response to a request without texts, which only loads a model.

        Return None if the request has texts. fields: the request's body.

        Raises:
            ApiError: the request names another model than the served one.
        """
        given = convert_fields(EmbedFields, fields)
        if given.input:
            return None
        check_model(self.model, given.model)
        return {"model": self.model.name, "embeddings": []}

    def parse(
        self, http: HttpRequest, fields: Mapping[str, Any], ready: Ready
    ) -> ParsedRequest:
        """Return the `ParsedRequest` of a request for embeddings, checked.

        The engine generates one token for each input, which no client sees.

        fields: the request's body. ready: the engine's sizes and limits.

        Raises:
            ApiError: a field is wrong.
        """
        given: Any = convert_fields(self.kinds[0], fields)
        name = fields.get("model")
        if not self.ours:
            name = untagged(self.model, given.model)
        request = self.model.begin({"model": name}, ready, self.source)
        SchedulingHandler().read(convert_fields(SchedulingFields, fields), request)
        request.ignored += [name for name in COPIED if fields.get(name) is not None]
        request.headers.append((b"x-ladder-warning", WARNING))
        encode_prompts(self.model, request, given.input)
        request.options["wanted"] = [MEAN]
        request.prompt_only = True
        request.sampling = {"max_tokens": 1, "temperature": 0.0}
        self.model.finish(request)
        coded = self.ours and given.encoding_format == "base64"
        request.formatter = Vectors(self.model.name, self.ours, given.dimensions, coded)
        return request
