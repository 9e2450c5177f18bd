"""Log-probabilities and ids of tokens, and prompts that are echoed with theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from math import nan
from typing import Any

from msgspec import Struct

from common.events import Logprob
from common.http.errors import wrong
from common.text.detokenizer import Detokenizer
from common.text.tokenizer import Tokenizer
from phases.appendix.embeddings.note_kinds import PROMPT_LOGPROBS
from serving.completion import Choice, Piece
from serving.parsed import ParsedRequest


def spelled(tokenizer: Tokenizer, choice: Choice, place: int, token: int) -> bytes:
    """Return the bytes by which a token stands in a completion's text; they may be a part of a character.

    place: index of the token in `choice.tokens`. The first token with text may lose its leading space.
    token: its id, or that of another candidate for this place.
    """
    known, special = tokenizer.token_bytes, tokenizer.special_ids
    first = place < choice.stream.beginning and token not in special
    return known.first(token) if first else known[token]


def scored(choice: Choice, piece: Piece) -> Iterator[tuple[int, int, Logprob]]:
    """Yield (index in the output, token id, log-probabilities) for each token of a piece of a completion.

    Tokens without log-probabilities are left out.
    """
    for place in range(piece.start, min(piece.stop, len(choice.logprobs))):
        yield place, choice.tokens[place], choice.logprobs[place]


Spell = Callable[[int], bytes]
"""Returns the bytes by which the token with an id stands in a text."""
Entry = tuple[Spell, int, Logprob | None]
"""A token's spelling, its id, and its log-probability, which a prompt's first token has not."""


def _with_prompt(echoed: list[str], choice: Choice, piece: Piece) -> dict[str, Any]:
    """Return `{"text": ...}`: a piece's text, with the prompt's text in front if it is the first piece.

    echoed: text of each prompt of the request.
    """
    prompt = "" if piece.start else echoed[choice.index // choice.request.params.n]
    return {"text": prompt + piece.text}


class CompletionLogprobFields(Struct, kw_only=True):
    """Request fields of completions about log-probabilities: `logprobs` (how many a token) and `echo`."""

    logprobs: int | None = None
    echo: bool | None = False
    prompt_logprobs: None = None


class CompletionLogprobs:
    """Handles `logprobs` and `echo` of `/v1/completions`: lists of tokens and log-probabilities in the
    response.
    """

    fields = CompletionLogprobFields
    names = frozenset(CompletionLogprobFields.__struct_fields__)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def read(self, given: CompletionLogprobFields, request: ParsedRequest) -> None:
        """Set up `request` for `logprobs` and `echo`, and register what adds them to the response."""
        echoed = list[str]()  # the text of each prompt
        if given.echo:
            request.on_prompt.append(
                lambda: echoed.extend(
                    self._text(prompt, request) for prompt in request.prompts
                )
            )
            request.details.append(partial(_with_prompt, echoed))
            if (
                request.sampling.get("max_tokens") == 0
            ):  # an engine computes nothing for no token
                request.sampling["max_tokens"] = 1
                request.prompt_only = True
        if given.logprobs is not None:
            request.sampling["logprobs"] = given.logprobs
            request.details.append(partial(self.lists, echoed))
            if given.echo:
                request.options["wanted"] = [PROMPT_LOGPROBS]

    def lists(self, echoed: list[str], choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return the response's `logprobs`: tokens, log-probabilities, likeliest tokens, and offsets in
        the text.

        echoed: texts of the prompts; if not empty, the first piece has entries of the prompt, too.
        choice, piece: the completion, and which of its tokens to list.
        """
        entries, offsets = list[Entry](), list[int]()
        before = 0
        if echoed:
            before = len(echoed[choice.index // choice.request.params.n])
        if echoed and not piece.start:
            entries += self._prompt(choice)
            # Special tokens have no text there, and a character may have several tokens.
            pieces = map(Detokenizer(self.tokenizer).push, choice.prompt[: len(entries) - 1])
            offsets += accumulate(map(len, pieces), initial=0)
        for place, token, logprob in scored(choice, piece):
            spell = partial(spelled, self.tokenizer, choice, place)
            entries.append((spell, token, logprob))
        sizes = choice.stream.sizes  # a text may be held back, and be sent with a later token
        before += sum(sizes[: piece.start])
        own = accumulate(sizes[piece.start : piece.stop], initial=before)
        offsets += list(own)[: len(entries) - len(offsets)]
        if not entries:
            return {"logprobs": None}
        return {
            "logprobs": {
                "tokens": [_text(spell(token)) for spell, token, _ in entries],
                "token_logprobs": [each and _finite(each.chosen) for _, _, each in entries],
                "top_logprobs": [
                    each and self._top(spell, token, each) for spell, token, each in entries
                ],
                "text_offset": offsets,
            }
        }

    def _text(self, prompt: list[int], request: ParsedRequest) -> str:
        """Return a prompt's text, without a last character of which the output has the other bytes."""
        decoder = Detokenizer(self.tokenizer)
        text = "".join(map(decoder.push, prompt))
        return text + decoder.incomplete() if request.prompt_only else text

    def _prompt(self, choice: Choice) -> Iterator[Entry]:
        """Yield the entry of each prompt token."""
        first = choice.group.choices[choice.index - choice.index % choice.request.params.n]
        known, special = self.tokenizer.token_bytes, self.tokenizer.special_ids
        entries = [None, *first.notes[PROMPT_LOGPROBS]]
        begins = True  # so far no token has a text
        for token, entry in zip(choice.prompt, entries, strict=False):
            spell = known.first if begins else known.__getitem__
            begins = begins and (token in special or not known[token])
            yield spell, token, entry and Logprob(entry[0], tuple(map(tuple, entry[1])))

    def _top(self, spell: Spell, token: int, entry: Logprob) -> dict[str, float]:
        """Return {text: log-probability} of the most likely tokens and of `token` itself.

        The key is `token_id:N` if another token has the same text.
        """
        own, top = _text(spell(token)), dict[str, float]()
        for other, value in (*entry.top, (token, entry.chosen)):
            text = _text(spell(other))
            taken = other != token and (text == own or text in top)
            top[f"token_id:{other}" if taken else text] = _finite(value)
        return top


class ChatLogprobFields(Struct, kw_only=True):
    """Request fields of chats about log-probabilities: `logprobs` and `top_logprobs` (how many a token)."""

    logprobs: bool | None = False
    top_logprobs: int | None = None
    prompt_logprobs: None = None


class ChatLogprobs:
    """Handles a chat's `logprobs` and `top_logprobs`: one object for each token in the response."""

    fields = ChatLogprobFields
    names = frozenset(ChatLogprobFields.__struct_fields__)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def read(self, given: ChatLogprobFields, request: ParsedRequest) -> None:
        """Set up `request` for `logprobs` and `top_logprobs`, and register what adds them to the response.

        Raises:
            ApiError: `top_logprobs` is given without `logprobs`.
        """
        if given.top_logprobs and not given.logprobs:
            raise wrong("top_logprobs", "top_logprobs needs logprobs to be true")
        if given.logprobs:
            request.sampling["logprobs"] = given.top_logprobs or 0
            request.names["logprobs"] = "top_logprobs"
            request.details.append(self.content)

    def content(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return the response's `logprobs` in OpenAI's form, with one entry for each token of a piece."""
        content = []
        for place, token, logprob in scored(choice, piece):
            top = [self._one(choice, place, *other) for other in logprob.top]
            content.append(
                self._one(choice, place, token, logprob.chosen) | {"top_logprobs": top}
            )
        return {"logprobs": {"content": content, "refusal": None} if content else None}

    def _one(self, choice: Choice, place: int, token: int, logprob: float) -> dict[str, Any]:
        """Return one token's entry: text, log-probability, and bytes (none for a special token).

        place: index in the completion's tokens. token: its id.
        """
        data = spelled(self.tokenizer, choice, place, token)
        added = b"" if token in self.tokenizer.special_ids else data
        return {"token": _text(data), "logprob": _finite(logprob), "bytes": list(added)}


class TokenFields(Struct, kw_only=True):
    """Request fields `return_token_ids` and `return_token_marks` (which tokens were drafts)."""

    return_token_ids: bool | None = False  # vLLM's
    return_token_marks: bool | None = (
        False  # in streams: the text of each token, and if it was a draft
    )


class TokenIds:
    """Handles `return_token_ids` and `return_token_marks`.

    Marks are for streams: each token's text, and whether speculative decoding drafted it.
    """

    fields = TokenFields
    names = frozenset(TokenFields.__struct_fields__)

    def read(self, given: TokenFields, request: ParsedRequest) -> None:
        """Register what adds token ids or marks to the response, if the request's fields ask for them."""
        if given.return_token_ids:
            request.details.append(self.ids)
        if given.return_token_marks and request.generation.stream:
            request.details.append(self.marks)

    def ids(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return `token_ids` of a piece of the output; if the response is not streamed, also
        `prompt_token_ids`.
        """
        found = {"token_ids": choice.tokens[piece.start : piece.stop]}
        return found if choice.group.streamed else found | {"prompt_token_ids": choice.prompt}

    def marks(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return `token_marks`: (text, "draft" or "") for each token of a piece that has a text.

        Of several tokens that one step sampled, all but the last were drafts.
        """
        texts, times = (
            choice.texts[piece.start : piece.stop],
            choice.times[piece.start : piece.stop + 1],
        )
        found = zip(texts, times, [*times[1:], nan, nan], strict=False)
        return {
            "token_marks": [
                (text, "draft" if now == then else "") for text, now, then in found if text
            ]
        }


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _finite(value: float) -> float:
    """Return a number that JSON can hold: -9999 instead of NaN and of every number below -9999."""
    return max(-9999.0, value)  # in this order it is no NaN
