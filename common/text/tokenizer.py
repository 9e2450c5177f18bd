"""Convert a text to token ids and back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from common.errors import UserError, shown
from common.files import decoded, read_bytes
from common.models.fields import MOST_BYTES
from common.text.chat_template import ChatTemplate, Message
from common.text.detokenizer import Detokenizer, TokenBytes
from common.text.special_guard import SpecialGuard
from common.text.template_sandbox import SOURCE_CHARACTERS

# The library is given batches of one, for which it lets Python's lock go: else a megabyte would stop every
# thread for seconds, the event loop of a server among them. Threads of its own would gain nothing there.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

MOST_TOKENIZER_BYTES = 1 << 27
"""Largest `tokenizer.json`: published ones with 260,000 tokens have 33 million bytes."""
MOST_TEMPLATE_BYTES = 4 * SOURCE_CHARACTERS
MOST_TEMPLATES = 64
"""Most files in `additional_chat_templates`."""

LONG = 2000
"""Characters of a text above which a server encodes it in another thread."""


class Tokenizer:
    """A model's tokenizer: `tokenizer.json`, and what the files beside it say about special tokens.

    Attributes:
        backend: the library's tokenizer.
        bos_token_id: the id that begins a text, or None.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read the tokenizer in a model's folder.

        Raises:
            UserError: there is no usable `tokenizer.json`.
        """
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        raw = _read_optional(path, MOST_TOKENIZER_BYTES)
        if raw is None:
            raise UserError(f"the model folder {self.folder} has no tokenizer.json")
        with _named(str(path)):
            _refuse_growth(path, raw)
            self.backend = tokenizers.Tokenizer.from_buffer(raw)
        self.backend.no_truncation()  # some published files would cut prompts or pad them
        self.backend.no_padding()
        tokens, size = (
            self.backend.get_vocab_size(with_added_tokens=False),
            self._model_config("vocab_size"),
        )
        if isinstance(size, int) and tokens > size:  # fewer are common: embeddings are padded
            raise UserError(
                f"{path} has {tokens:,} tokens, but the model of config.json has {size:,}"
            )
        self._config = _read_json(self.folder / "tokenizer_config.json")
        self._special_tokens = _named_tokens(self.folder, self._config)
        self.bos_token_id = self._bos_token_id()

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens, added ones included. A model's embedding is often padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, after the token that begins a text if the model was trained with one.

        `add_bos_token` in `tokenizer_config.json` decides, and if it is missing, `tokenizer.json` does. A
        text that begins with this token itself gets no other.

        Args:
            add_special_tokens: False: the ids of the text alone.

        Raises:
            UserError: `text` is not valid Unicode.
        """
        if not add_special_tokens:
            return self._encode(text, add_special_tokens=False)
        ids = self._encode(
            text, add_special_tokens=self._config.get("add_bos_token") is not False
        )
        return (
            ids[1:]
            if self._adds_bos and ids[:2] == [self.bos_token_id] * 2
            else self._begun(ids)
        )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; invalid UTF-8 becomes U+FFFD, and an id outside the
        vocabulary nothing.
        """
        text: str = self.backend.decode_batch(
            [list(ids)], skip_special_tokens=skip_special_tokens
        )[0]
        if self.token_bytes.byte_fallback and "\ufffd" in text:
            # One invalid byte spoils the whole run of bytes around it for the library. SentencePiece itself
            # keeps the run's characters, and a stream has to: it has shown them before the byte arrives.
            detokenizer = Detokenizer(self, skip_special_tokens)
            text = "".join(map(detokenizer.push, ids)) + detokenizer.incomplete()
        return text

    def chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        add_special_tokens: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Return the ids of a conversation in the form the model was trained on.

        Args:
            messages: dictionaries with `role` and `content`.
            add_generation_prompt: whether to end with the words that open the assistant's turn.
            add_special_tokens: begin as `encode` does, where the template does not.
            variables: passed on to the template, such as `tools` or `enable_thinking=False`.

        Raises:
            UserError: the model has no chat template, or the template does not take these messages.
        """
        template, guard = (
            self.tool_template if variables.get("tools") else self.chat_template,
            self._guard,
        )
        conversation = template.conversation(messages)
        guarded, variables = guard.hide([conversation, plain := variables])
        text = template.render(
            guarded,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        if (guarded, variables) == (conversation, plain):
            ids = self._encode(
                text, add_special_tokens=False
            )  # the template has written them out
        else:
            with _named("the conversation"):
                ids = guard.encode(_unicode(text))
        return self._begun(ids) if add_special_tokens else ids

    def encode_guarded(self, text: str) -> list[int]:
        """Return the ids of a text that continues a conversation; special tokens in it are ordinary
        characters.
        """
        with _named("the conversation"):
            return self._guard.encode(_unicode(self._guard.hide(text)))

    def _begun(self, ids: list[int]) -> list[int]:
        """Return `ids` with the token that begins a text in front, if the model has one and it is not there
        yet.
        """
        bos = self.bos_token_id
        begins = bos is not None and (
            self._adds_bos or bool(self._config.get("add_bos_token"))
        )
        return [bos, *ids] if begins and ids[:1] != [bos] else ids  # type: ignore[list-item]

    @cached_property
    def _adds_bos(self) -> bool:
        """Return True if `tokenizer.json` puts the token that begins a text before every text."""
        if self.bos_token_id is None or self._config.get("add_bos_token") is False:
            return False
        return self._encode("", add_special_tokens=True)[:1] == [self.bos_token_id]

    def most_characters(self, tokens: int) -> int | None:
        """Return the most characters that `tokens` tokens may stand for; None: there is no such bound.

        With it a text that is far too long can be refused without tokenizing it. Byte-level vocabularies
        and those with a token for every byte drop no character. A normalizer may join some into one.
        """
        if not (self.token_bytes.byte_level or self.token_bytes.byte_fallback):
            return None
        return (
            tokens * self._longest_token * (1 if self.backend.normalizer is None else _JOINED)
        )

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Return the ids of the tokens that are left out of a text, such as those that begin and end a
        turn.
        """
        added = self.backend.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Return the bytes that each token adds in the middle of a text, by id."""
        return TokenBytes(self.backend)

    @cached_property
    def _guard(self) -> SpecialGuard:
        return SpecialGuard(self.backend)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """Return the compiled chat template.

        Raises:
            UserError: the model has none, as a model that was only pretrained.
        """
        return self._template("default")

    @property
    def has_chat_template(self) -> bool:
        """Return True if the model has a template for conversations without tools."""
        return isinstance(self._chat_templates.get("default"), str)

    @cached_property
    def tool_template(self) -> ChatTemplate:
        """The chat template for conversations with tools: the model's `tool_use` if it has one, else
        `chat_template`.
        """
        return (
            self._template("tool_use")
            if "tool_use" in self._chat_templates
            else self.chat_template
        )

    def _template(self, name: str) -> ChatTemplate:
        sources = self._chat_templates
        source = sources.get(name, sources.get("default"))
        if not isinstance(source, str):
            raise UserError(
                f"the model in {self.folder} has no chat template: give it plain text to continue"
            )
        contents = {name: _content(token) for name, token in self._special_tokens.items()}
        return ChatTemplate(
            source, {name: each for name, each in contents.items() if isinstance(each, str)}
        )

    @cached_property
    def _chat_templates(self) -> dict[str, Any]:
        """Sources of the model's chat templates by name; a single one is `default`. Template files come
        before configurations.
        """
        source = self._config.get("chat_template")
        if source is None:
            source = _read_json(self.folder / "chat_template.json").get("chat_template")
        found = {"default": source}
        if isinstance(
            source, list
        ):  # several by name, of which `default` is for conversations without tools
            entries = [entry for entry in source if isinstance(entry, dict)]
            found = {str(entry.get("name")): entry.get("template") for entry in entries}
        more = list(
            islice(self.folder.glob("additional_chat_templates/*.jinja"), MOST_TEMPLATES + 1)
        )
        if len(more) > MOST_TEMPLATES:
            folder = self.folder / "additional_chat_templates"
            raise UserError(
                f"{folder} has more than {MOST_TEMPLATES} templates, but may have no more"
            )
        for path in [*more, self.folder / "chat_template.jinja"]:
            raw = _read_optional(path, MOST_TEMPLATE_BYTES)
            if raw is not None:
                name = path.stem if path in more else "default"
                found[name] = decoded(raw, f"the chat template {path}")
        return found

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with _named("the text"):
            (found,) = self.backend.encode_batch_fast(
                [_unicode(text)], add_special_tokens=add_special_tokens
            )
        return list(found.ids)

    def _model_config(self, field: str) -> Any:
        return _read_json(self.folder / "config.json").get(field)

    def _bos_token_id(self) -> int | None:
        if "bos_token" in self._special_tokens:
            named = self._special_tokens["bos_token"]
            token = _content(named)
            if token is not None and not isinstance(token, str):
                found = (
                    f"bos_token of {self.folder / 'tokenizer_config.json'} is {shown(named)}"
                )
                raise UserError(f"{found}, but must be a string, or an object with a content")
            return None if token is None else self.backend.token_to_id(token)
        found = self._model_config("bos_token_id")
        return found if isinstance(found, int) else None


_JOINED = 4
"""Most characters that a Unicode normalizer makes one of: letters with their accents."""


class _Brief(msgspec.Struct):
    """The part of `tokenizer.json` that can be read in less than a second: all but the vocabulary.

    normalizer, decoder: steps before and after encoding, each of which may be a sequence.
    added_tokens: tokens beside the vocabulary.
    """

    normalizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    added_tokens: list[dict[str, Any]] = []


MOST_GROWTH = 64
"""Most times by which all replacements of a `tokenizer.json` together may lengthen a text."""


def _refuse_growth(path: Path, raw: bytes) -> None:
    """Raise `UserError` if replacements in a `tokenizer.json` lengthen a text more than `MOST_GROWTH` times.

    path: for the message. raw: the file's content.
    """
    steps = msgspec.json.decode(raw, type=_Brief)
    for kind, several in (("normalizer", "normalizers"), ("decoder", "decoders")):
        growth, parts = 1, [getattr(steps, kind)]
        while parts:
            part = parts.pop() or {}
            parts += part.get(several) or []
            if part.get("type") == "Replace":
                length = len((part.get("pattern") or {}).get("String") or "") or 1
                growth *= max(1, -(-len(part.get("content") or "") // length))
        if growth > MOST_GROWTH:
            raise UserError(
                f"the {kind} of {path} makes a text up to {growth:,} times as long, but may make it "
                f"{MOST_GROWTH} times as long"
            )


def eos_of_tokenizer(folder: Path) -> int | None:
    """Return the id of the end-of-sequence token that the tokenizer's files name; None if they name none.

    It need not be the one of `config.json`. All of `tokenizer.json` is loaded only if the token is not
    among those added to the vocabulary.
    """
    token = _content(
        _named_tokens(folder, _read_json(folder / "tokenizer_config.json")).get("eos_token")
    )
    if not isinstance(token, str):
        return None
    raw = _read_optional(folder / "tokenizer.json", MOST_TOKENIZER_BYTES)
    if raw is None:
        return None
    with suppress(msgspec.MsgspecError, RecursionError):  # loading it below says what is wrong
        for added in msgspec.json.decode(raw, type=_Brief).added_tokens:
            if added.get("content") == token and isinstance(added.get("id"), int):
                return int(added["id"])
    return Tokenizer(folder).backend.token_to_id(token)


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Turn any error of the tokenizers library in a block into a `UserError` that names `what`.

    The library raises nothing more specific than Exception, and where its Rust code panics, for instance
    because a file contradicts itself, a BaseException that `except Exception` would let through.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # the user stops the program
        raise UserError(f"{what} cannot be used by the tokenizer ({error})") from None


def _unicode(text: str) -> str:
    """Return `text` if Rust accepts it. Raises `UserError` if it holds half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the text holds {text[error.start]!r} at position {error.start}, which is not valid Unicode"
        ) from None
    return text


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty where there is no such file."""
    raw = _read_optional(path, MOST_BYTES)
    if raw is None:
        return {}
    try:
        content = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8 is a ValueError, too
        raise UserError(f"{path} is not valid JSON ({error})") from None
    return content if isinstance(content, dict) else {}


def _read_optional(path: Path, most: int) -> bytes | None:
    """Return the bytes of a file in a model's folder, at most `most`; None if there is none. Raises
    `UserError`.
    """
    try:
        return read_bytes(path, most)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None


def _named_tokens(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return special tokens by name: `bos_token`, `eos_token`, and names of the model's own.

    `special_tokens_map.json` is read as `transformers` does: it is older than `added_tokens_decoder`, and
    if a configuration has that, the file only adds to it.
    """
    found = _read_json(folder / "special_tokens_map.json")
    own = {name: token for name, token in config.items() if name.endswith("_token")}
    found = found | own if "added_tokens_decoder" in config else own | found
    more = config.get("extra_special_tokens")
    return more | found if isinstance(more, dict) else found


def _content(token: Any) -> Any:
    """Return the text of a special token, which a configuration holds as a string or as an object."""
    return token.get("content") if isinstance(token, dict) else token
