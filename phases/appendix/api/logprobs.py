"""Response fields with log-probabilities and ids of tokens, also for prompts that are echoed."""

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
    """Return the UTF-8 bytes that a token has in a completion's text, perhaps only part of a character.

    choice: the completion. place: index of the token in `choice.tokens`. The first token with text may lose
        its leading space.
    token: id of the token, or of another candidate for this index.
    """
    known, special = tokenizer.token_bytes, tokenizer.special_ids
    first = place < choice.stream.beginning and token not in special
    return known.first(token) if first else known[token]


def scored(choice: Choice, piece: Piece) -> Iterator[tuple[int, int, Logprob]]:
    """Yield (index in `choice.tokens`, token id, log-probabilities) for each token of `piece`.

    piece: the part of the completion `choice` that is sent now. Tokens without log-probabilities are left
        out.
    """
    for place in range(piece.start, min(piece.stop, len(choice.logprobs))):
        yield place, choice.tokens[place], choice.logprobs[place]


Spell = Callable[[int], bytes]
"""Returns the bytes by which the token with an id stands in a text."""
Entry = tuple[Spell, int, Logprob | None]
"""A token's spelling, its id, and its log-probability, which a prompt's first token has not."""


def _with_prompt(echoed: list[str], choice: Choice, piece: Piece) -> dict[str, Any]:
    """Return `{"text": ...}`: the text of a piece, after the prompt's text if it is the first piece.

    echoed: text of each prompt of the request. choice: the completion. piece: the part of it that is sent
        now.
    """
    prompt = "" if piece.start else echoed[choice.index // choice.request.params.n]
    return {"text": prompt + piece.text}


class CompletionLogprobFields(Struct, kw_only=True):
    """Request fields of completions: `logprobs` (likeliest tokens to list for each) and `echo`."""

    logprobs: int | None = None
    echo: bool | None = False
    prompt_logprobs: None = None


class CompletionLogprobs:
    """Handles `logprobs` and `echo` of `/v1/completions`, which add to the response."""

    fields = CompletionLogprobFields
    names = frozenset(CompletionLogprobFields.__struct_fields__)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def read(self, given: CompletionLogprobFields, request: ParsedRequest) -> None:
        """Set up `request` for `logprobs` and `echo`, with functions that add to its response.

        given: the two fields, as the client has sent them.
        """
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
        """Return `{"logprobs": ...}` of a piece of a completion, in OpenAI's form.

        The value has four lists with an entry for each token, or is None without tokens: texts,
        log-probabilities, {text: log-probability} of the likeliest tokens, and offsets in the text
        (characters).

        echoed: texts of the prompts; if not empty, the first piece has entries of the prompt's tokens, too.
        choice: the completion. piece: the part of it that is sent now.
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
        """Return the text of `prompt` (token ids), as it is put in front of the output.

        If its last tokens are the beginning of a character and the output continues it, these bytes are left
        out: the output's text has the character.
        """
        decoder = Detokenizer(self.tokenizer)
        text = "".join(map(decoder.push, prompt))
        return text + decoder.incomplete() if request.prompt_only else text

    def _prompt(self, choice: Choice) -> Iterator[Entry]:
        """Yield (spelling function, token id, log-probabilities) for each token of a prompt.

        The function returns the bytes of a token id in the text. The first token has None for
        log-probabilities.

        choice: a completion of the prompt.
        """
        first = choice.group.choices[choice.index - choice.index % choice.request.params.n]
        known, special = self.tokenizer.token_bytes, self.tokenizer.special_ids
        entries = [None, *first.notes[PROMPT_LOGPROBS]]
        begins = True  # so far no token has a text
        for token, entry in zip(choice.prompt, entries, strict=False):
            spell = known.first if begins else known.__getitem__
            begins = begins and (token in special or not known[token])
            yield spell, token, entry and Logprob(entry[0], tuple(map(tuple, entry[1])))

    def _top(self, spell: Spell, token: int, entry: Logprob) -> dict[str, float]:
        """Return {text: log-probability} of the likeliest tokens in `entry`, and of the chosen `token`.

        spell: returns the bytes of a token id in the text. A token's key is `token_id:N` if another token has
            the same text.
        """
        own, top = _text(spell(token)), dict[str, float]()
        for other, value in (*entry.top, (token, entry.chosen)):
            text = _text(spell(other))
            taken = other != token and (text == own or text in top)
            top[f"token_id:{other}" if taken else text] = _finite(value)
        return top


class ChatLogprobFields(Struct, kw_only=True):
    """Request fields of chats: `logprobs` (yes or no), `top_logprobs` (likeliest tokens to list)."""

    logprobs: bool | None = False
    top_logprobs: int | None = None
    prompt_logprobs: None = None


class ChatLogprobs:
    """Handles a chat's `logprobs` and `top_logprobs`: adds an object for each token to the response."""

    fields = ChatLogprobFields
    names = frozenset(ChatLogprobFields.__struct_fields__)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def read(self, given: ChatLogprobFields, request: ParsedRequest) -> None:
        """Set up `request` for `logprobs` and `top_logprobs`, with a function that adds to its response.

        given: the two fields, as the client has sent them.

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
        """Return `{"logprobs": ...}` of a piece of a chat's output, in OpenAI's form.

        choice: the completion. piece: the part of it that is sent now. The value has an entry for each token
            of the piece, or is None without tokens.
        """
        content = []
        for place, token, logprob in scored(choice, piece):
            top = [self._one(choice, place, *other) for other in logprob.top]
            content.append(
                self._one(choice, place, token, logprob.chosen) | {"top_logprobs": top}
            )
        return {"logprobs": {"content": content, "refusal": None} if content else None}

    def _one(self, choice: Choice, place: int, token: int, logprob: float) -> dict[str, Any]:
        """Return a token's entry in a chat's `logprobs`: keys `token` (text), `logprob`, `bytes`.

        choice: the completion. place: index in its tokens. token: its id; a special token has no bytes.
        """
        data = spelled(self.tokenizer, choice, place, token)
        added = b"" if token in self.tokenizer.special_ids else data
        return {"token": _text(data), "logprob": _finite(logprob), "bytes": list(added)}


class TokenFields(Struct, kw_only=True):
    """Request fields `return_token_ids` and `return_token_marks` (which tokens were speculative drafts)."""

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
        """Append to `request.details` the functions that add token ids or marks to the response.

        given: which of them the client asks for; marks are added to streams only.
        """
        if given.return_token_ids:
            request.details.append(self.ids)
        if given.return_token_marks and request.generation.stream:
            request.details.append(self.marks)

    def ids(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return `{"token_ids": [...]}` of a piece, with `prompt_token_ids` unless it is streamed.

        choice: the completion. piece: the part of it that is sent now.
        """
        found = {"token_ids": choice.tokens[piece.start : piece.stop]}
        return found if choice.group.streamed else found | {"prompt_token_ids": choice.prompt}

    def marks(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return `{"token_marks": [...]}`: (text, "draft" or "") for each token with a text.

        choice: the completion. piece: the part of it that is sent now. Of several tokens that one step of the
            engine gave, all but the last were drafts.
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
