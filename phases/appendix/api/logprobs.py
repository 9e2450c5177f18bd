"""Log-probabilities and ids of tokens, and prompts that are echoed with theirs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate, islice
from math import nan
from typing import Any

from msgspec import Struct

from common.events import Logprob
from common.text.tokenizer import Tokenizer
from phases.appendix.embeddings.note_kinds import PROMPT_LOGPROBS
from serving.completion import Choice, Piece
from serving.http.errors import wrong
from serving.parsed import ParsedRequest


def spelled(tokenizer: Tokenizer, choice: Choice, place: int, token: int) -> bytes:
    """Return the bytes of a token at a place of an output as its text has them; perhaps half a character."""
    known, special = tokenizer.token_bytes, tokenizer.special_ids
    before = islice(choice.tokens, place)
    first = (
        choice.begins
        and token not in special
        and all(one in special or not known[one] for one in before)
    )
    return known.first(token) if first else known[token]


def scored(choice: Choice, piece: Piece) -> Iterator[tuple[int, int, Logprob]]:
    """Yield the place of each token of a piece, the token, and its log-probabilities."""
    for place in range(piece.start, min(piece.stop, len(choice.logprobs))):
        yield place, choice.tokens[place], choice.logprobs[place]


Row = tuple[str, float | None, dict[str, float] | None]
"""A token's text, its log-probability, and those of the likeliest by their texts."""


def _with_prompt(echoed: list[str], choice: Choice, piece: Piece) -> dict[str, Any]:
    """Return the text of a piece with the prompt's in front."""
    text = "" if choice.request.prompt_only else piece.text
    prompt = "" if piece.start else echoed[choice.index // choice.request.params.n]
    return {"text": prompt + text}


class CompletionLogprobFields(Struct, kw_only=True):
    """Fields of completions about log-probabilities."""

    logprobs: int | None = None
    echo: bool | None = False
    prompt_logprobs: None = None


class CompletionLogprobs:
    """Handler of a completion's `logprobs`: adds lists of tokens, with the prompt's for `echo`."""

    fields = CompletionLogprobFields
    names = frozenset(CompletionLogprobFields.__struct_fields__)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def read(self, given: CompletionLogprobFields, request: ParsedRequest) -> None:
        """Read `logprobs` and `echo` into the request, and add their part of the response."""
        echoed = list[str]()  # the text of each prompt
        if given.echo:
            decode = self.tokenizer.decode
            request.on_prompt.append(
                lambda: echoed.extend(decode(prompt) for prompt in request.prompts)
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
            request.wanted += [PROMPT_LOGPROBS] if given.echo else []

    def lists(self, echoed: list[str], choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return the log-probabilities of a piece's tokens as lists, one entry a token."""
        rows, offsets = list[Row](), list[int]()
        before = 0
        if echoed:
            before = len(echoed[choice.index // choice.request.params.n])
        if echoed and not piece.start:
            rows += self._prompt(choice)
            offsets += accumulate((len(text) for text, _, _ in rows[:-1]), initial=0)
        for place, token, logprob in (
            () if choice.request.prompt_only else scored(choice, piece)
        ):
            spell = partial(spelled, self.tokenizer, choice, place)
            rows.append(
                (
                    _text(spell(token)),
                    _finite(logprob.chosen),
                    self._top(token, logprob, spell),
                )
            )
        before += sum(map(len, choice.texts[: piece.start]))
        sizes = map(len, choice.texts[piece.start : piece.stop])
        offsets += list(accumulate(sizes, initial=before))[: len(rows) - len(offsets)]
        if not rows:
            return {"logprobs": None}
        texts, values, tops = zip(*rows, strict=True)
        return {
            "logprobs": {
                "tokens": texts,
                "token_logprobs": values,
                "top_logprobs": tops,
                "text_offset": offsets,
            }
        }

    def _prompt(self, choice: Choice) -> Iterator[Row]:
        """Yield the entries of the prompt's tokens; the first one has no log-probability."""
        first = choice.group.choices[choice.index - choice.index % choice.request.params.n]
        known = self.tokenizer.token_bytes
        entries = [None, *first.notes[PROMPT_LOGPROBS]]
        for token, entry in zip(choice.prompt, entries, strict=False):
            if entry is None:
                yield _text(known.first(token)), None, None
                continue
            logprob = Logprob(entry[0], tuple(map(tuple, entry[1])))
            yield (
                _text(known[token]),
                _finite(logprob.chosen),
                self._top(token, logprob, known.__getitem__),
            )

    def _top(self, token: int, entry: Logprob, spell: Any) -> dict[str, float]:
        """Return the most likely tokens' log-probabilities by text; by id where two tokens have the
        same text.
        """
        own, top = _text(spell(token)), dict[str, float]()
        for other, value in (*entry.top, (token, entry.chosen)):
            text = _text(spell(other))
            taken = other != token and (text == own or text in top)
            top[f"token_id:{other}" if taken else text] = _finite(value)
        return top


class ChatLogprobFields(Struct, kw_only=True):
    """Fields of chats about log-probabilities."""

    logprobs: bool | None = False
    top_logprobs: int | None = None
    prompt_logprobs: None = None


class ChatLogprobs:
    """Handler of a chat's `logprobs` and `top_logprobs`: adds one object a token."""

    fields = ChatLogprobFields
    names = frozenset(ChatLogprobFields.__struct_fields__)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def read(self, given: ChatLogprobFields, request: ParsedRequest) -> None:
        """Read `logprobs` and `top_logprobs` into the request, and add their part of the response."""
        if given.top_logprobs and not given.logprobs:
            raise wrong("top_logprobs", "top_logprobs needs logprobs to be true")
        if given.logprobs:
            request.sampling["logprobs"] = given.top_logprobs or 0
            request.names["logprobs"] = "top_logprobs"
            request.details.append(self.content)

    def content(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return the log-probabilities of a piece's tokens."""
        content = []
        for place, token, logprob in scored(choice, piece):
            top = [self._one(choice, place, *other) for other in logprob.top]
            content.append(
                self._one(choice, place, token, logprob.chosen) | {"top_logprobs": top}
            )
        return {"logprobs": {"content": content, "refusal": None} if content else None}

    def _one(self, choice: Choice, place: int, token: int, logprob: float) -> dict[str, Any]:
        """Return the entry of one token: text, bytes, log-probability. Special tokens have no bytes."""
        data = spelled(self.tokenizer, choice, place, token)
        added = b"" if token in self.tokenizer.special_ids else data
        return {"token": _text(data), "logprob": _finite(logprob), "bytes": list(added)}


class TokenFields(Struct, kw_only=True):
    """Fields of requests that ask for the ids of tokens."""

    return_token_ids: bool | None = False  # vLLM's
    return_token_marks: bool | None = (
        False  # in streams: the text of each token, and if it was a draft
    )


class TokenIds:
    """Handler of `return_token_ids`, which adds ids, and of `return_token_marks`.

    Marks are for streams: each token's text, and whether it was a draft.
    """

    fields = TokenFields
    names = frozenset(TokenFields.__struct_fields__)

    def read(self, given: TokenFields, request: ParsedRequest) -> None:
        """Read `return_token_ids` and `return_token_marks`, and add their part of the response."""
        if given.return_token_ids:
            request.details.append(self.ids)
        if given.return_token_marks and request.generation.stream:
            request.details.append(self.marks)

    def ids(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return the token ids of a piece of the output, and with a whole response those of the prompt."""
        found = {"token_ids": choice.tokens[piece.start : piece.stop]}
        return found if choice.group.streamed else found | {"prompt_token_ids": choice.prompt}

    def marks(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return each token's text and whether it was a draft: of several tokens of one step all but
        the last were.
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
    """Return a number that JSON can hold; -9999 for minus infinity and NaN, as OpenAI does."""
    return max(-9999.0, value)  # in this order it is no NaN
