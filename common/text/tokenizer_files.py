"""Read the files of a model's tokenizer: `tokenizer.json`, and those beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from common.errors import UserError, library_errors, shown
from common.files import decoded, read_bytes
from common.models.fields import MOST_BYTES
from common.text.template_sandbox import SOURCE_CHARACTERS

MOST_TOKENIZER_BYTES = 1 << 27
"""Largest `tokenizer.json`: published ones with 260,000 tokens have 33 million bytes."""
MOST_TEMPLATE_BYTES = 4 * SOURCE_CHARACTERS
MOST_TEMPLATES = 64
"""Most files in `additional_chat_templates`."""


def load_backend(folder: Path) -> tokenizers.Tokenizer:
    """Return a model's tokenizer as an object of the library `tokenizers`, without truncation and padding.

    folder: the model's.

    Raises:
        UserError: there is no usable `tokenizer.json`.
    """
    path = folder / "tokenizer.json"
    raw = read_optional(path, MOST_TOKENIZER_BYTES)
    if raw is None:
        raise UserError(f"the model folder {folder} has no tokenizer.json")
    with library_errors(str(path)):
        _refuse_growth(path, raw)
        backend = tokenizers.Tokenizer.from_buffer(raw)
    backend.no_truncation()  # some published files would cut prompts or pad them
    backend.no_padding()
    tokens = backend.get_vocab_size(with_added_tokens=False)
    size = read_json(folder / "config.json").get("vocab_size")
    if isinstance(size, int) and tokens > size:  # fewer are common: embeddings are padded
        raise UserError(
            f"{path} has {tokens:,} tokens, but the model of config.json has {size:,}"
        )
    with library_errors(str(folder / "tokenizer_config.json")):
        _add_tokens(backend, folder, size if isinstance(size, int) else None)
    return backend


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def _add_tokens(backend: tokenizers.Tokenizer, folder: Path, size: int | None) -> None:
    """Add the tokens that the files beside `tokenizer.json` list or name, as `transformers` does.

    A token that a file gives a name, such as `pad_token`, becomes special. A list of special tokens without
    names only adds tokens, and changes none that `tokenizer.json` has.

    size: number of tokens in the model's vocabulary, beyond which none is added; None: not known.
    """
    config = read_json(folder / "tokenizer_config.json")
    names = named_tokens(folder, config).values()
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    before = {repr(token) for token in known.values()}
    listed = config.get("added_tokens_decoder")
    listed = listed if isinstance(listed, dict) else {}
    if "added_tokens_decoder" not in config:  # two older files say what it would
        config |= read_json(folder / "special_tokens_map.json")
        special = [content_of(token) for token in names]
        listed = {
            str(index): {"content": token, "normalized": token not in special}
            for token, index in read_json(folder / "added_tokens.json").items()
            if token not in known
        }
    for place in sorted(filter(str.isdecimal, listed), key=int):
        for token in _token(listed[place], special=False):
            known[token.content] = token
    for named in names:
        for token in _token(named, special=True):
            known.setdefault(token.content, token).special = True
    more = config.get("extra_special_tokens")
    if not more or isinstance(more, dict):  # names of its own, or nothing, as version 4 wrote
        more = config.get("additional_special_tokens")
    for entry in more if isinstance(more, list) else []:
        for token in _token(entry, special=True):
            known.setdefault(token.content, token)
    changed = [token for token in known.values() if repr(token) not in before]
    new = [token.content for token in changed if backend.token_to_id(token.content) is None]
    spare = len(new) if size is None else max(size - backend.get_vocab_size(), 0)
    backend.add_tokens([token for token in changed if token.content not in {*new[spare:]}])


def _token(entry: Any, *, special: bool) -> Iterator[tokenizers.AddedToken]:
    """Yield an `AddedToken` for `entry`, a string or an object of a configuration; nothing if it is neither.

    special: True: the token is special in any case; False: if the entry says so.
    """
    content, flags = content_of(entry), entry if isinstance(entry, dict) else {}
    if isinstance(content, str):
        said = {name: flags.get(name) is True for name in _FLAGS}
        yield tokenizers.AddedToken(
            content, **said, special=special or flags.get("special") is True
        )


def bos_token(
    folder: Path, special_tokens: Mapping[str, Any], backend: tokenizers.Tokenizer
) -> int | None:
    """Return the id of the token that begins a text; None if the model has none.

    folder: the model's. special_tokens: by name, such as `bos_token`. backend: the tokenizer, for the id.
    """
    if "bos_token" not in special_tokens:
        found = read_json(folder / "config.json").get("bos_token_id")
        return found if isinstance(found, int) else None
    named = special_tokens["bos_token"]
    token = content_of(named)
    if token is not None and not isinstance(token, str):
        words = f"bos_token of {folder / 'tokenizer_config.json'} is {shown(named)}"
        raise UserError(f"{words}, but must be a string, or an object with a content")
    return None if token is None else backend.token_to_id(token)


def chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sources of a model's chat templates by name; a single one is `default`.

    Files `*.jinja` in the folder override templates in its JSON files.

    config: the content of `tokenizer_config.json`.
    """
    source = config.get("chat_template")
    if source is None:
        source = read_json(folder / "chat_template.json").get("chat_template")
    found = {"default": source}
    if isinstance(
        source, list
    ):  # several, of which `default` is for conversations without tools
        found = {
            str(entry.get("name")): entry.get("template")
            for entry in source
            if isinstance(entry, dict)
        }
    more = list(islice(folder.glob("additional_chat_templates/*.jinja"), MOST_TEMPLATES + 1))
    if len(more) > MOST_TEMPLATES:
        place = folder / "additional_chat_templates"
        raise UserError(
            f"{place} has more than {MOST_TEMPLATES} templates, but may have no more"
        )
    for path in [*more, folder / "chat_template.jinja"]:
        raw = read_optional(path, MOST_TEMPLATE_BYTES)
        if raw is not None:
            name = path.stem if path in more else "default"
            found[name] = decoded(raw, f"the chat template {path}")
    return found


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
    token = content_of(
        named_tokens(folder, read_json(folder / "tokenizer_config.json")).get("eos_token")
    )
    if not isinstance(token, str):
        return None
    raw = read_optional(folder / "tokenizer.json", MOST_TOKENIZER_BYTES)
    if raw is None:
        return None
    with suppress(msgspec.MsgspecError, RecursionError):  # loading it below says what is wrong
        for added in msgspec.json.decode(raw, type=_Brief).added_tokens:
            if added.get("content") == token and isinstance(added.get("id"), int):
                return int(added["id"])
    return load_backend(folder).token_to_id(token)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if there is no such file, or it holds no object.

    Raises:
        UserError: the file is not valid JSON, or cannot be read.
    """
    raw = read_optional(path, MOST_BYTES)
    if raw is None:
        return {}
    try:
        content = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8 is a ValueError, too
        raise UserError(f"{path} is not valid JSON ({error})") from None
    return content if isinstance(content, dict) else {}


def read_optional(path: Path, most: int) -> bytes | None:
    """Return the bytes of a file in a model's folder; None if there is no such file.

    Raises:
        UserError: the file has more than `most` bytes, or cannot be read.
    """
    try:
        return read_bytes(path, most)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None


def named_tokens(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return special tokens by name: `bos_token`, `eos_token`, and names of the model's own.

    config: the content of `tokenizer_config.json`. If it has `added_tokens_decoder`, its names override those
        in the older file `special_tokens_map.json`; otherwise that file's override them.
    """
    found = read_json(folder / "special_tokens_map.json")
    own = {name: token for name, token in config.items() if name.endswith("_token")}
    found = found | own if "added_tokens_decoder" in config else own | found
    more = config.get("extra_special_tokens")
    return more | found if isinstance(more, dict) else found


def content_of(token: Any) -> Any:
    """Return the text of a special token, which a configuration holds as a string or as an object."""
    return token.get("content") if isinstance(token, dict) else token
