"""From text and conversations to token ids, without making others wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import MappingProxyType
from typing import Any, TypeVar

from common.errors import UserError
from common.text.ids import LONG
from common.text.tokenizer import Tokenizer
from serving.http.errors import ApiError
from serving.messages import Ready

MANY = 50
"""Messages above which a conversation is long, whatever stands in them."""
Messages = list[dict[str, Any]]
T = TypeVar("T")


class Prompts:
    """Encodes for one model: what is short at once, what is long in a thread.

    defaults: settings of the model for requests that do not say; see `sampling_defaults`.
    """

    def __init__(self, tokenizer: Tokenizer, defaults: Mapping[str, float] = MappingProxyType({})) -> None:
        self.tokenizer, self.defaults = tokenizer, defaults
        self._threads = ThreadPoolExecutor(2, "tokenize")
        with suppress(UserError):  # it has none; where it has one it is compiled now, not while others stream
            _ = tokenizer.chat_template

    async def encode(
        self, text: str, add_special_tokens: bool = True, ready: Ready | None = None
    ) -> list[int]:
        """Return the token ids of a text; `ready`: it has to fit the context. Raises `ApiError`."""
        if ready is not None:
            self.fits(len(text), ready, "prompt")
        return await self.make(
            len(text) > LONG, lambda: self.tokenizer.encode(text, add_special_tokens), "prompt"
        )

    async def chat(
        self,
        messages: Messages,
        settings: Mapping[str, Any] = MappingProxyType({}),
        before: Callable[[Messages], Messages] = list,
    ) -> list[int]:
        """Return the token ids of a conversation. Raises `ApiError`.

        settings: of `Tokenizer.chat`, and variables of the template.
        before: brings the messages into the shape of templates, in the thread that encodes them.
        """
        size = sum(len(str(part)) for part in (*messages, settings))
        long = len(messages) > MANY or size > LONG
        return await self.make(long, lambda: self.tokenizer.chat(before(messages), **settings), "messages")

    def fits(self, characters: int, ready: Ready, param: str) -> None:
        """Raise `ApiError` for a text that is too long whatever its tokens are, before it is tokenized."""
        most = self.tokenizer.most_characters(ready.max_len)
        if most is not None and characters > most:
            raise ApiError(
                400,
                f"{param} has {characters:,} characters, more than a context of {ready.max_len} tokens holds",
                param=param,
            )

    def fits_messages(self, messages: Sequence[Mapping[str, Any]], ready: Ready) -> None:
        """Raise `ApiError` as `fits` does, for the texts of messages together."""
        contents = (one.get("content") for one in messages)
        self.fits(sum(len(text) for text in contents if isinstance(text, str)), ready, "messages")

    async def make(self, long: bool, make: Callable[[], T], param: str) -> T:
        """Run `make` in a thread if it is long: 10 KB take a millisecond, and others would wait."""
        try:
            if not long:
                return make()
            return await asyncio.get_running_loop().run_in_executor(self._threads, make)
        except UserError as error:
            raise ApiError(400, str(error), param=param) from None
