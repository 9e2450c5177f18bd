"""Encode conversations; special tokens count where the chat template writes them, not in messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from common.errors import UserError, library_errors
from common.errors import text as valid_text
from common.text.blind_tokenizer import BlindTokenizer, StandIns
from common.text.chat_template import Message
from common.text.continued import render_continued
from common.text.turns import join_turns

if TYPE_CHECKING:
    from common.text.tokenizer import Tokenizer


class ChatEncoder:
    """Encodes conversations in the form that a model was trained on. Call it as `tokenizer.chat`.

    Tokenizers look for special tokens in the whole rendered conversation, and cannot distinguish a
    template's from a user's. So one character of each special token in a message is replaced by a stand-in
    before the template is rendered; the template treats them like any other text. The rendered text
    is encoded by a `BlindTokenizer`, which looks for special tokens first and turns stand-ins back then.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.stand_ins = StandIns(tokenizer.backend)

    def __call__(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        add_special_tokens: bool = False,
        ignored: set[str] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Return the token ids of a conversation.

        Args:
            messages: dictionaries with `role` and `content`.
            add_generation_prompt: whether to end with the words that open the assistant's turn.
            add_special_tokens: add the token that begins a text, if the template has not.
            ignored: gets the names of fields of messages that the template does not read.
            variables: passed on to the template, such as `tools` or `enable_thinking=False`; with
                `continue_final_message=True` the ids end with the last message's content.

        Raises:
            UserError: the model has no chat template, or the template does not take these messages, even with
                consecutive turns of one role joined.
        """
        templates = self._tokenizer.templates
        template = templates.tools if variables.get("tools") else templates.plain
        conversation = template.conversation(messages, ignored)
        continued = variables.pop("continue_final_message", False)
        render = partial(render_continued, template) if continued else template.render
        variables["add_generation_prompt"] = add_generation_prompt and not continued
        try:
            ids = self._encode(render, conversation, variables)
        except UserError:
            joined = join_turns(conversation)
            if joined == conversation:
                raise
            ids = self._encode(render, joined, variables)
        return self._tokenizer.begun(ids) if add_special_tokens else ids

    def _encode(
        self,
        render: Callable[..., str],
        conversation: list[dict[str, Any]],
        variables: dict[str, Any],
    ) -> list[int]:
        guarded, given = self.hide([conversation, variables])
        hidden = guarded != conversation or given != variables
        text = valid_text("the conversation", render(guarded, **given))
        with library_errors("the conversation"):
            if hidden:
                return self._blind.encode(text)
            batch = self._tokenizer.backend.encode_batch_fast([text], add_special_tokens=False)
            ids = list(batch[0].ids)
            return self._blind.checked(text, ids) if self.stand_ins.rewritten else ids

    def hide(self, value: Any, *, whole: bool = False) -> Any:
        """Return `value` with one character of each special token in its texts replaced.

        value: a text, or lists and objects that hold texts. whole: only whole ones count, not halves of one.

        Raises:
            UserError: a text with a special token contains one of the stand-ins already.
        """
        if isinstance(value, str):
            harmless = self.stand_ins.of.keys().isdisjoint(value)
            return value if harmless else self.stand_ins.hide(value, whole)
        if isinstance(value, Mapping):
            return {
                self.hide(key, whole=True): self.hide(item, whole=whole or key == "role")
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return type(value)(map(partial(self.hide, whole=whole), value))
        return value

    @cached_property
    def _blind(self) -> BlindTokenizer:
        return BlindTokenizer(self._tokenizer.backend, self.stand_ins.of)
