"""Model configurations: the parts that no family's oracle test reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from common.errors import UserError
from common.models.config import ModelConfig

LLAMA = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "eos_token_id": 1,
}


def folder(path: Path, **files: object) -> Path:
    for name, content in files.items():
        (path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_generation_config_names_the_ends_of_a_turn(tmp_path: Path) -> None:
    assert ModelConfig.from_folder(folder(tmp_path, config=LLAMA)).eos_token_ids == (1,)
    both = folder(tmp_path, generation_config={"eos_token_id": [1, 7]})
    assert ModelConfig.from_folder(both).eos_token_ids == (1, 7)


def test_text_model_inside_a_multimodal_one() -> None:
    inner = {**LLAMA, "model_type": "gemma3_text", "eos_token_id": 3, "hidden_size": 12}
    config = ModelConfig.from_hf({"model_type": "gemma3", "eos_token_id": [5, 6], "text_config": inner})
    assert (config.family, config.hidden_size, config.eos_token_ids) == ("gemma3", 12, (5, 6))


def test_switched_off_window_is_off() -> None:
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 4, "max_window_layers": 2}
    assert ModelConfig.from_hf({**qwen, "use_sliding_window": False}).sliding_windows == (None, None, None)
    assert ModelConfig.from_hf({**qwen, "use_sliding_window": True}).sliding_windows == (None, None, 4)


def test_kv_bytes() -> None:
    """2 (key, value) x 3 layers x 2 heads x 2 dimensions x 4 bytes."""
    assert ModelConfig.from_hf(LLAMA).kv_bytes_per_token(torch.float32) == 2 * 3 * 2 * 2 * 4


@pytest.mark.parametrize(
    ("content", "says"), [("{", "not valid JSON"), ("[]", "holds a list"), (None, "needs a config.json")]
)
def test_broken_files_are_named(tmp_path: Path, content: str | None, says: str) -> None:
    with pytest.raises(UserError, match=says):
        ModelConfig.from_folder(folder(tmp_path, config=content) if content else tmp_path)
