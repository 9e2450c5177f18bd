"""Replicas of `ladder serve` under Ray, by phase 15."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common.device import pick_device
from common.errors import EngineLost
from common.options import route
from phases.appendix.connections.proxy import PROXY
from phases.commands.served_app import make_app, say_ready
from phases.commands.served_engine import check
from replicas.options import ReplicaOptions
from serving.app import App
from serving.client import EngineClient
from serving.liveness import StartupError

RAY_BEYOND_THIS_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable that lets Ray's processes talk to other machines; without it they listen on the
loopback.
"""


def replica_options(options: Mapping[str, Any]) -> ReplicaOptions | None:
    """Return the checked options of replicas (phase 15); None if they ask for no replica."""
    copies = ReplicaOptions(**route(options, [ReplicaOptions])[0])
    return copies if copies.replicas else None


def serve_replicas(
    given: SimpleNamespace,
    folder: Path,
    make: Callable[[], EngineClient],
    copies: ReplicaOptions,
    made: tuple[Any, ...],
) -> int:
    """Serve copies of the server behind a proxy until SIGINT or SIGTERM; return the exit code. Imports Ray.

    given: the command line's arguments, with attributes made from them: `limits` (of requests) and `keys`
        (API keys). folder: of the tokenizer.
    make: starts an engine's process, and returns its client; called in each replica.
    copies: how many replicas, and where.
    made: (phase, engine options, device, dtype), which are checked first.

    Raises:
        EngineLost, UserError: the replicas cannot be started.
    """
    checked = check(*made)
    gpus = 0
    if pick_device(given.device).type == "cuda":
        gpus = int(checked.own.get("tensor_parallel") or 1)
    if copies.cluster is None:
        os.environ |= {
            RAY_BEYOND_THIS_MACHINE: "0",
            "RAY_AUTH_MODE": "token",
        }  # read when Ray is imported
    from replicas.cluster import Cluster

    app = partial(_make_app, make, folder, given)
    where = {"host": given.host, "port": given.port, "connection": PROXY}
    cluster = Cluster(app, copies, gpus, given.limits, **where)
    try:
        return cluster.serve(lambda: say_ready(cluster.host, cluster.port))
    except StartupError as error:
        raise EngineLost(f"the replicas cannot be started: {error}") from None


def _make_app(make: Callable[[], EngineClient], folder: Path, given: SimpleNamespace) -> App:
    return make_app(make(), folder, given)
