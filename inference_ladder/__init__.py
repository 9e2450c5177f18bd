"""The installed package: `from inference_ladder import LLM, SamplingParams`.

A phase's package is imported by its own name (`from prefix_cache import LLM`), because a folder such as
`08_prefix_cache` cannot be. An editable install makes those names known to every program. A wheel holds
`common` and `phases` inside this package, so that it takes no other name in an environment: the phases' names
can be imported once this package has been.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.sampling.params import SamplingParams as SamplingParams
    from cuda_graphs import LLM as LLM

HERE = Path(__file__).resolve().parent
if (
    HERE / "phases"
).is_dir():  # first, so that another package's `common` is not taken for ours
    sys.path[:0] = [str(HERE), *map(str, sorted((HERE / "phases").glob("[0-9]*")))]


def __getattr__(name: str) -> Any:
    """Return the attribute `LLM`, of phase 09, or `SamplingParams`, imported now: so PyTorch is imported
    late.

    Raises:
        AttributeError: any other `name`.
    """
    if name == "LLM":
        from cuda_graphs import LLM

        return LLM
    if name == "SamplingParams":
        from common.sampling.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> None:
    """Run the `ladder` command."""
    from phases.__main__ import main as run

    run()
