"""Text to token ids and back, one text at a time or one token at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from common.errors import UserError, integer, shown
from common.text.chat_template import ChatTemplate, Message
from common.text.detokenizer import Detokenizer, TokenBytes
from common.text.ids import ids_of, text_of
from common.text.special_guard import SpecialGuard
from common.text.template_sandbox import SOURCE_CHARACTERS


class Tokenizer:
    """A model's tokenizer: `tokenizer.json`, and what the files beside it say about special tokens.

    Attributes:
        eos_token_ids: every id that ends a text, from `generation_config.json`, else `config.json`, else
            `tokenizer_config.json`; empty when none of them names one.
        bos_token_id: the id that begins a text, or None.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read the tokenizer in a model's folder.

        Raises:
            UserError: there is no usable `tokenizer.json`.
        """
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"the model folder {self.folder} has no tokenizer.json")
        with _named(str(path)):
            self.backend = tokenizers.Tokenizer.from_file(str(path))
        self.backend.no_truncation()  # some published files would cut prompts or pad them
        self.backend.no_padding()
        tokens, size = self.backend.get_vocab_size(with_added_tokens=False), self._model_config("vocab_size")
        if isinstance(size, int) and tokens > size:  # fewer are common: embeddings are padded
            raise UserError(f"{path} has {tokens:,} tokens, but the model of config.json has {size:,}")
        self._config = _read_json(self.folder / "tokenizer_config.json")
        self.eos_token_ids = self._eos_token_ids()
        self.bos_token_id = self._bos_token_id()

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included. A model's embedding is often padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, after the token that begins a text if the model was trained with one.

        `add_bos_token` in `tokenizer_config.json` decides, and where it does not say, `tokenizer.json` does.

        Raises:
            UserError: `text` is not valid Unicode.
        """
        add_bos = self._config.get("add_bos_token")
        ids = self._encode(text, add_special_tokens=add_bos is not False)
        if add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; invalid UTF-8 becomes U+FFFD, and an id outside the vocabulary nothing."""
        text = text_of(self.backend, ids, skip_special_tokens=skip_special_tokens)
        if self.token_bytes.byte_fallback and "\ufffd" in text:
            # One invalid byte spoils the whole run of bytes around it for the library. SentencePiece itself
            # keeps the run's characters, and a stream has to: it has shown them before the byte arrives.
            detokenizer = Detokenizer(self, skip_special_tokens)
            text = "".join(map(detokenizer.push, ids)) + detokenizer.incomplete()
        return text

    def chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """The ids of a conversation in the form the model was trained on.

        Args:
            messages: dictionaries with `role` and `content`.
            add_generation_prompt: whether to end with the words that open the assistant's turn.
            variables: passed on to the template, such as `tools` or `enable_thinking=False`.

        Raises:
            UserError: the model has no chat template, or the template does not take these messages.
        """
        template, guard = self.tool_template if variables.get("tools") else self.chat_template, self._guard
        conversation = template.conversation(messages)
        guarded = guard.hide([conversation, variables])
        if guarded == [conversation, variables]:
            text = template.render(conversation, add_generation_prompt=add_generation_prompt, **variables)
            return self._encode(text, add_special_tokens=False)  # the template has written them out
        conversation, variables = guarded
        text = template.render(conversation, add_generation_prompt=add_generation_prompt, **variables)
        with _named("the conversation"):
            return guard.encode(_unicode(text))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The tokens that are left out of a text, such as those that begin and end a turn."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes that each token adds in the middle of a text."""
        return TokenBytes(self.backend)

    @cached_property
    def _guard(self) -> SpecialGuard:
        return SpecialGuard(self.backend)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The compiled chat template.

        Raises:
            UserError: the model has none, as a model that was only pretrained.
        """
        return self._template("default")

    @cached_property
    def tool_template(self) -> ChatTemplate:
        """The chat template for conversations with tools, where the model has one of its own for them."""
        return self._template("tool_use") if "tool_use" in self._chat_templates else self.chat_template

    def _template(self, name: str) -> ChatTemplate:
        sources = self._chat_templates
        source = sources.get(name, sources.get("default"))
        if not isinstance(source, str):
            raise UserError(
                f"the model in {self.folder} has no chat template: give it plain text to continue"
            )
        special = {key: _content(value) for key, value in self._config.items() if key.endswith("_token")}
        return ChatTemplate(source, {key: value for key, value in special.items() if value is not None})

    @cached_property
    def _chat_templates(self) -> dict[str, Any]:
        """By name; one that is alone is `default`."""
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            if path.stat().st_size > 4 * SOURCE_CHARACTERS:  # before reading what may be gigabytes
                raise UserError(f"{path} has {path.stat().st_size:,} bytes, too many for a chat template")
            try:
                return {"default": path.read_text(encoding="utf-8")}
            except (ValueError, OSError) as error:
                raise UserError(f"{path} cannot be read as UTF-8 ({error})") from None
        source = self._config.get("chat_template")
        if source is None:
            source = _read_json(self.folder / "chat_template.json").get("chat_template")
        if isinstance(source, list):  # several by name, of which `default` is for conversations without tools
            entries = [entry for entry in source if isinstance(entry, dict)]
            return {str(entry.get("name")): entry.get("template") for entry in entries}
        return {"default": source}

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with _named("the text"):
            return ids_of(self.backend, _unicode(text), add_special_tokens=add_special_tokens)

    def _special(self, name: str) -> str | None:
        """The text of a special token, if `tokenizer_config.json` names it."""
        token = _content(self._config.get(name))
        if token is not None and not isinstance(token, str):
            found = f"{name} of {self.folder / 'tokenizer_config.json'} is {shown(self._config[name])}"
            raise UserError(f"{found}, but must be a string, or an object with a content")
        return token

    def _model_config(self, field: str) -> Any:
        return _read_json(self.folder / "config.json").get(field)

    def _eos_token_ids(self) -> tuple[int, ...]:
        for name in ("generation_config.json", "config.json"):
            found = _read_json(self.folder / name).get("eos_token_id")
            if found is not None:
                several = found if isinstance(found, list) else [found]
                return tuple(
                    integer(f"eos_token_id of {self.folder / name}", index, low=0) for index in several
                )
        token = self._special("eos_token")
        index = None if token is None else self.backend.token_to_id(token)
        return () if index is None else (index,)

    def _bos_token_id(self) -> int | None:
        if "bos_token" in self._config:
            token = self._special("bos_token")
            return None if token is None else self.backend.token_to_id(token)
        found = self._model_config("bos_token_id")
        return found if isinstance(found, int) else None


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Tell by name what the tokenizers library could not take.

    It raises nothing more specific than Exception, and where its Rust code panics, for instance because a
    file contradicts itself, a BaseException that `except Exception` would let through.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # somebody stops the program
        raise UserError(f"{what} cannot be used by the tokenizer ({error})") from None


def _unicode(text: str) -> str:
    """`text`, which Rust takes only without halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the text holds {text[error.start]!r} at position {error.start}, which is not valid Unicode"
        ) from None
    return text


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError, RecursionError) as error:  # not UTF-8 is a ValueError, too
        raise UserError(f"{path} is not valid JSON ({error})") from None
    return content if isinstance(content, dict) else {}


def _content(token: Any) -> Any:
    """The text of a special token, which the configuration holds as a string or as an object."""
    return token.get("content") if isinstance(token, dict) else token
