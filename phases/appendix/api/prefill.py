"""Continue the last turn of the assistant."""

from __future__ import annotations

from msgspec import Struct

from common.http.errors import wrong
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

    def read(self, given: PrefillFields, request: ParsedRequest) -> None:
        """Have the prompt end with the content of the last message, for which the template closes no turn.

        Raises:
            ApiError: the last message is not a text of the assistant.
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
