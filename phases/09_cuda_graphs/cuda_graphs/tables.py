"""Block tables that stay on the device: only what has changed is sent.

A captured graph reads its inputs from fixed addresses. The tables are the one input that is large (a row for
every running request, a column for every block of the longest), and between two decode steps almost nothing
in them changes: a request takes a new block every `block_size` tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from continuous.batch import Ints, upload


class DeviceTables:
    """A copy on the device of the host's block tables, for CUDA graphs.

    data: `[rows, max_blocks]` int32. Only entries that `update` was called for are sure to be up to date.
    """

    def __init__(self, tables: NDArray[np.int32], device: torch.device) -> None:
        self._tables, self._sent = tables, np.zeros_like(tables)
        self.data = torch.zeros(tables.shape, dtype=torch.int32, device=device)

    def update(self, rows: Ints, blocks: int) -> None:
        """Send the first `blocks` entries of some rows' block tables to the device, where they have changed.

        An entry is sent only if it differs from the value that was sent last; a call with no change sends
        nothing. So no caller has to report changes, be it a new block, a copy on write or a block that the
        prefix cache replaced by an equal one. Entries of other rows, and those past `blocks`, stay as they
        are until a call asks for them.

        rows: distinct rows of the tables.
        """
        now = self._tables[rows, :blocks]
        found = np.flatnonzero(now != self._sent[rows, :blocks])
        if not len(found):
            return
        line, column = np.divmod(found, blocks)
        values = now[line, column]
        self._sent[rows[line], column] = values
        entries = rows[line] * self.data.shape[1] + column
        moved = upload(self.data.device, {"entries": entries, "values": values})
        self.data.view(-1)[moved["entries"]] = moved["values"]
