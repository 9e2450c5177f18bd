"""Continue the last turn of the assistant."""

from __future__ import annotations

from functools import partial

from msgspec import Struct

from common.http.errors import wrong
from common.text.tokenizer import Tokenizer
from phases.appendix.api.reasoning import CHANNEL, END, MESSAGE, has_channels, opened
from serving.parsed import ParsedRequest


class PrefillFields(Struct, kw_only=True):
    """Request field `continue_final_message` (vLLM's): the output continues the assistant's last message."""

    continue_final_message: bool | None = None


class Prefill:
    """Handles `continue_final_message`: the output continues the last message, which must be the
    assistant's.
    """

    fields = PrefillFields
    names = frozenset(PrefillFields.__struct_fields__)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def read(self, given: PrefillFields, request: ParsedRequest) -> None:
        """Remove the assistant's last message from `request.messages`, and plan to end the prompt with
        its text.

        Raises:
            ApiError: the last message is not a text of the assistant.
        """
        if not given.continue_final_message:
            return
        *before, last = request.messages or [{}]
        text = last.get("content")
        if last.get("role") != "assistant" or not isinstance(text, str) or not before:
            words = (
                "continue_final_message needs a last message of the assistant that is a text"
            )
            raise wrong("continue_final_message", words)
        request.messages = before
        request.variables["add_generation_prompt"] = True
        request.on_prompt.append(partial(self._extend, request, text))

    def _extend(self, request: ParsedRequest, text: str) -> None:
        """Append the tokens of `text` to the request's prompt, after closing an opened reasoning block."""
        (prompt,) = request.prompts
        mark = ""
        if has_channels(self.tokenizer):
            mark = f"{CHANNEL}final{MESSAGE}"
        elif opened(self.tokenizer, prompt):
            mark = f"\n{END}\n\n"
        prompt += self.tokenizer.encode(mark, add_special_tokens=False)
        prompt += self.tokenizer.encode_guarded(text)
