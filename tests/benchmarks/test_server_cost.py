"""What the API process spends on a token: the measurement runs, and nothing has become many times dearer."""

from __future__ import annotations

import pytest

from benchmarks.server_cost import alone, measured, streams


@pytest.mark.long
def test_a_token_costs_little():
    found = {}

    async def work(port, process):
        await streams(port, process, 32, 20, False)
        found["us"] = await streams(port, process, 32, 300, True)
        found["ms"] = await alone(port, 10)

    measured(0.002, work)
    assert 1 < found["us"] < 150, f"{found['us']:.0f} us of the API process a streamed token"
    assert found["ms"] < 500
