"""Let a chat's output continue the last message, which is the assistant's (prefill)."""

from __future__ import annotations

from msgspec import Struct

from common.http.errors import wrong
from serving.parsed import ParsedRequest


class PrefillFields(Struct, kw_only=True):
    """Request field `continue_final_message` (vLLM's): the output continues the assistant's last message."""

    continue_final_message: bool | None = None


class Prefill:
    """Handles `continue_final_message`: the output continues the assistant's last message."""

    fields = PrefillFields
    names = frozenset(PrefillFields.__struct_fields__)

    def read(self, given: PrefillFields, request: ParsedRequest) -> None:
        """Have the prompt end within the last message, to be continued, if `given` asks for it.

        The chat template then writes no end of that message.

        Raises:
            ApiError: the last message is not the assistant's, has no text, or calls tools.
        """
        if not given.continue_final_message:
            return
        last = request.messages[-1] if request.messages else {}
        text, calls = last.get("content"), last.get("tool_calls")
        if last.get("role") != "assistant" or not isinstance(text, str | list) or calls:
            words = (
                "continue_final_message needs a last message of the assistant that is a text"
            )
            raise wrong("continue_final_message", words)
        request.variables["continue_final_message"] = True
