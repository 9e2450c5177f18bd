"""A pytest plugin that stands in for packages of a foreign project which its tests import to start a server.

Their server is not started: ours runs already, at `LADDER_URL`. Whatever else they import from there is a
name that can be imported and called, and says nothing: a case that needs more fails, and is listed so.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import unittest
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import Any, ClassVar
from unittest.mock import MagicMock

URL = os.environ["LADDER_URL"]
PACKAGES = ("vllm", "sglang", "torch", "pybase64")


class Empty(ModuleType):
    """A module that has every name."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = type(name, (Exception,), {}) if name.endswith("Error") else MagicMock(name=name)
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages that are stood in for, and all below them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] in PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class RemoteServer:
    """Our server where theirs would be: a context with clients."""

    DUMMY_API_KEY = "none"

    def __init__(self, model: str, *_: Any, **__: Any) -> None:
        self.model, self.url_root = model, URL

    def __enter__(self) -> RemoteServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join([URL, *(part.strip("/") for part in parts)])

    def get_client(self, **options: Any) -> Any:
        import openai

        return openai.OpenAI(base_url=f"{URL}/v1", api_key="none", **({"max_retries": 0} | options))

    def get_async_client(self, **options: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", **({"max_retries": 0} | options))


def tokenizer(*_: Any, **__: Any) -> Any:
    """The served model's tokenizer, whatever was asked for."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ["LADDER_TOKENIZER"])


sys.meta_path.insert(0, Finder())
utils: Any = Empty("tests.utils")
utils.RemoteOpenAIServer = RemoteServer
sys.modules["tests.utils"] = utils
tokenizers: Any = Empty("vllm.tokenizers")
tokenizers.get_tokenizer = tokenizer
sys.modules["vllm.tokenizers"] = tokenizers
started: Any = Empty("sglang.test.test_utils")
started.DEFAULT_URL_FOR_TEST = URL
started.DEFAULT_SMALL_MODEL_NAME_FOR_TEST = started.DEFAULT_MODEL_NAME_FOR_TEST = "default"
started.STDOUT_FILENAME, started.STDERR_FILENAME = "stdout.txt", "stderr.txt"
started.CustomTestCase = unittest.IsolatedAsyncioTestCase
started.is_in_amd_ci = started.is_rust_server_built = lambda: False
sys.modules["sglang.test.test_utils"] = started
theirs: Any = Empty("sglang.srt.utils.hf_transformers_utils")
theirs.get_tokenizer = tokenizer
sys.modules["sglang.srt.utils.hf_transformers_utils"] = theirs
