"""The chat templates that a model's folder has."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.text.chat_template import ChatTemplate
from common.text.tokenizer_files import chat_templates, content_of


class ModelTemplates:
    """The chat templates of a model, each of which is compiled when it is first used.

    folder: the model's. config: its `tokenizer_config.json`. special_tokens: by name, such as `bos_token`.
    """

    def __init__(
        self, folder: Path, config: Mapping[str, Any], special_tokens: Mapping[str, Any]
    ) -> None:
        self.folder = folder
        self._sources = chat_templates(folder, config)
        self._special_tokens = {
            name: text
            for name, token in special_tokens.items()
            if isinstance(text := content_of(token), str)
        }

    @cached_property
    def plain(self) -> ChatTemplate:
        """Return the template for conversations without tools.

        Raises:
            UserError: the model has none, as a model that was only pretrained.
        """
        return self._compile("default")

    @cached_property
    def tools(self) -> ChatTemplate:
        """Return the template for conversations with tools: the model's `tool_use`, or else `plain`."""
        return self._compile("tool_use") if "tool_use" in self._sources else self.plain

    @property
    def available(self) -> bool:
        """Return True if the model has a template for conversations without tools."""
        return isinstance(self._sources.get("default"), str)

    def _compile(self, name: str) -> ChatTemplate:
        source = self._sources.get(name)
        if not isinstance(source, str):
            raise UserError(
                f"the model in {self.folder} has no chat template: give it plain text to continue"
            )
        return ChatTemplate(source, self._special_tokens)
