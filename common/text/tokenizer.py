"""Convert a text to token ids and back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from common.errors import library_errors
from common.errors import text as valid_text
from common.text.chat_encoder import ChatEncoder
from common.text.detokenizer import Detokenizer, TokenBytes
from common.text.model_templates import ModelTemplates
from common.text.tokenizer_files import bos_token, load_backend, named_tokens, read_json

# The library is given batches of one, for which it lets Python's lock go: else a megabyte would stop every
# thread for seconds, the event loop of a server among them. Threads of its own would gain nothing there.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

LONG = 2000
"""Characters of a text above which a server encodes it in another thread."""
_JOINED = 4
"""Most characters that a Unicode normalizer makes one of: letters with their accents."""


class Tokenizer:
    """A model's tokenizer: `tokenizer.json`, and what the files beside it say about special tokens.

    Attributes:
        backend: the object of the library `tokenizers`.
        token_bytes: the bytes that each token adds in the middle of a text, by id.
        bos_token_id: the id that begins a text, or None.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read the tokenizer in a model's folder.

        Raises:
            UserError: there is no usable `tokenizer.json`, or it has a decoder that cannot be streamed.
        """
        self.folder = Path(folder)
        self.backend = load_backend(self.folder)
        self.token_bytes = TokenBytes(self.backend)
        self._config = read_json(self.folder / "tokenizer_config.json")
        self._special_tokens = named_tokens(self.folder, self._config)
        self.bos_token_id = bos_token(self.folder, self._special_tokens, self.backend)

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
            return self._encode(text)
        ids = self._encode(text, self._config.get("add_bos_token") is not False)
        twice = self._adds_bos and ids[:2] == [self.bos_token_id] * 2
        return ids[1:] if twice else self.begun(ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; invalid UTF-8 becomes U+FFFD, and unknown ids become nothing."""
        # The library takes no others, and shows a special token that its normalizer rewrites.
        left_out = self.special_ids if skip_special_tokens else ()
        ids = [one for one in ids if 0 <= one < 1 << 32 and one not in left_out]
        text: str = self.backend.decode_batch([ids], skip_special_tokens)[0]
        if self.token_bytes.byte_fallback and "\ufffd" in text:
            # One invalid byte spoils the whole run of bytes around it for the library. SentencePiece itself
            # keeps the run's characters, and a stream has to: it has shown them before the byte arrives.
            shown = frozenset[int]() if skip_special_tokens else self.special_ids
            detokenizer = Detokenizer(self, shown)
            text = "".join(map(detokenizer.push, ids)) + detokenizer.incomplete()
        return text

    def begun(self, ids: list[int]) -> list[int]:
        """Return `ids` with the token that begins a text in front, if the model uses one and they lack it."""
        bos = self.bos_token_id
        if bos is None or ids[:1] == [bos]:
            return ids
        return [bos, *ids] if self._adds_bos or self._config.get("add_bos_token") else ids

    @cached_property
    def _adds_bos(self) -> bool:
        """Return True if `tokenizer.json` puts the token that begins a text before every text."""
        if self.bos_token_id is None or self._config.get("add_bos_token") is False:
            return False
        return self._encode("", True)[:1] == [self.bos_token_id]

    @cached_property
    def characters_per_token(self) -> int | None:
        """Return the most characters that a token may stand for; None: there is no such bound.

        By this bound a text that is far too long can be refused without tokenizing it. Only byte-level
        vocabularies and those with a token for every byte have one, since they drop no character. A
        normalizer may join some characters into one.
        """
        if not (self.token_bytes.byte_level or self.token_bytes.byte_fallback):
            return None
        longest = max(map(len, self.backend.get_vocab(with_added_tokens=True)))
        return longest if self.backend.normalizer is None else longest * _JOINED

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Return the ids of the tokens that no text shows, such as those that begin and end a turn."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    @cached_property
    def templates(self) -> ModelTemplates:
        """Return the model's chat templates as a `ModelTemplates`."""
        return ModelTemplates(self.folder, self._config, self._special_tokens)

    @cached_property
    def chat(self) -> ChatEncoder:
        """Return the model's `ChatEncoder`: `tokenizer.chat(messages)` returns token ids."""
        return ChatEncoder(self)

    def _encode(self, text: str, special: bool = False) -> list[int]:
        batch = [valid_text("the text", text)]
        with library_errors("the text"):
            (found,) = self.backend.encode_batch_fast(batch, add_special_tokens=special)
        return list(found.ids)
