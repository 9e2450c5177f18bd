"""The tokens that penalties look at: those of a prompt, and how often each stands in an output."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.sampling.metadata import Upload


class TokenHistory:
    """Tokens in the prompt and output of each row's request, as arrays on the device, for its penalties.

    The arrays are allocated when a request first has penalties. A CUDA graph captured before that must not
    use them, or must be captured again. They cost time only in steps with such requests.

    in_prompt: bool `[rows, V]`, whether the token is in the prompt. counts: int32 `[rows, V]`, how often it
        is in the output. Rows of requests without penalties have no meaning.
    changed: by row, prompt and output (token ids) that `send` has yet to copy to the device.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = rows, vocab_size
        self.in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.changed: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def send(self, upload: Upload) -> None:
        """Write the changed rows to the device. upload: copies an array to it without waiting."""
        if len(self.counts) == 0:
            self.in_prompt = self.in_prompt.new_zeros(self._shape)
            self.counts = self.counts.new_zeros(self._shape)
        for row, (prompt, output) in self.changed.items():
            self.in_prompt[row].zero_()[upload(prompt)] = True
            tokens = upload(output)
            one = torch.ones_like(tokens, dtype=torch.int32)
            self.counts[row].zero_().scatter_add_(0, tokens, one)
        self.changed.clear()

    def add(self, rows: Tensor, tokens: Tensor) -> None:
        """Count one more token for each of these rows: `tokens[i]` for `rows[i]`. Both are int64 `[B]`."""
        place = rows * self.counts.shape[1] + tokens
        one = torch.ones_like(place, dtype=torch.int32)
        self.counts.view(-1).scatter_add_(0, place, one)
