"""Every engine here runs in memory that was poisoned before."""

import pytest


@pytest.fixture(autouse=True)
def _poisoned(poison: None) -> None:
    pass
