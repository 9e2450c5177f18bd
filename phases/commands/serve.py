"""`ladder serve`: serve an engine by HTTP."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvloop

from common.collector import freeze_collector
from common.console import err, out
from common.device import pick_device, pick_dtype
from common.errors import EngineLost, UserError
from common.models.hub import model_folder
from common.neighbours import Usage, usage, warn
from common.options import route
from common.sampling.params import sampling_defaults
from common.sockets import listen
from common.temporary import temporary_folder
from common.text.made_up import write_tokenizer
from common.text.tokenizer import Tokenizer
from forward.loading import RANDOM
from forward.shapes import SHAPES
from phases import first_phases, phase_named
from phases.appendix.access.policy import hosts, names_of, origins
from phases.appendix.embeddings.prompt_states import PromptObserver
from phases.appendix.server import whole_app, whole_server
from phases.commands.arguments import joined
from phases.commands.one_at_a_time import OneAtATime
from phases.commands.plain import version
from phases.registry import (
    ROWS,
    Checked,
    check_options,
    default_weights,
    load_checked,
    missing_for,
)
from replicas.options import ReplicaOptions
from serving.app import App
from serving.http.limits import Limits
from serving.liveness import EngineProcess, StartupError

KEY = "LADDER_API_KEY"
RAY_BEYOND_THIS_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable that lets Ray's processes talk to other machines; without it they listen on the
loopback.
"""


def run(given: SimpleNamespace) -> int:
    """Serve until a signal, and return the exit code.

    given: the arguments of the command line; `options` are those of the engine, of `Limits`, and of
        `ReplicaOptions`.
    """
    begun, rung = usage(), phase_named(given.phase)
    of_engine = list(first_phases())
    limits, replicas = route(given.options, [Limits, ReplicaOptions], of_engine)
    checked, copies = Limits(**limits), ReplicaOptions(**replicas)
    own = {name: value for name, value in given.options.items() if name in of_engine}
    where = pick_device(given.device)
    pick_dtype(given.dtype, where)
    options = check_options(rung, own, where)
    if missing := missing_for(rung, where):
        err.print(
            f"[dim]{rung.name} runs in an interpreter or not at all here: it needs {missing}[/dim]"
        )
    given.name = given.name or given.model
    keys = _keys(given.api_key)
    server = {
        "limits": checked,
        "keys": keys,
        "allowed_origins": origins(joined(given.allowed_origins)),
        "hosts": names_of(given.host, hosts(joined(given.allowed_hosts)), keys=bool(keys)),
        "access_log": given.access_log,
        "version": version(),
    }
    make = partial(make_app, given, options, server)
    if copies.replicas:
        _folder_of(given.model)  # fetched once, before all of them ask
        gpus = int(own.get("tensor_parallel") or 1) if where.type == "cuda" else 0
        return _serve_replicas(make, copies, gpus, checked, given)
    return _serve(make(), given, bool(keys), begun if where.type == "cpu" else None)


def _folder_of(model: str) -> Path:
    """Return the folder with a model's tokenizer and, unless they are random, its weights."""
    if not model.startswith(RANDOM):
        return model_folder(model)
    shape = SHAPES.get(model.removeprefix(RANDOM))
    if shape is None:
        raise UserError(f"model is {model!r}, but the random shapes are {', '.join(SHAPES)}")
    folder = temporary_folder()
    write_tokenizer(folder, shape.vocab_size, shape.eos_token_ids)
    return folder


def make_app(given: SimpleNamespace, options: Checked, server: Mapping[str, Any]) -> App:
    """The application with an engine that is yet to be started.

    options: of the engine.
    server: keyword arguments of `whole_app`.
    """
    model, folder = given.model, _folder_of(given.model)
    source = model if model.startswith(RANDOM) else str(folder)
    make = partial(make_engine, options, source, str(folder), given.device, given.dtype)
    return whole_app(
        EngineProcess(make, observer=PromptObserver),
        Tokenizer(folder),
        given.name,
        defaults=sampling_defaults(folder, given.generation_config),
        **server,
    )


def make_engine(options: Checked, model: str, folder: str, device: str, dtype: str) -> Any:
    """Make the engine, in its own process. Phases that take no requests while they run serve one by one."""
    tokenizer = Tokenizer(folder)
    weights = default_weights(options, model, pick_device(device), dtype)
    engine = load_checked(options, weights, device=device, dtype=dtype, tokenizer=tokenizer)
    return engine if options.phase.number >= ROWS else OneAtATime(engine)


def _keys(api_key: Sequence[str] | None) -> tuple[str, ...]:
    """Return the accepted API keys: those of `--api-key`, or of the environment, which `ps` does not show."""
    given = os.environ.get(KEY) if api_key is None else joined(api_key)
    if given is None:
        return ()
    keys = tuple(key.strip() for key in given.split(",") if key.strip())
    if not keys:  # an open server must be asked for by no key at all
        name = KEY if api_key is None else "--api-key"
        raise UserError(f"{name} is empty, but must have at least 1 character")
    return keys


def _serve_replicas(
    make: Callable[[], App],
    copies: ReplicaOptions,
    gpus: int,
    limits: Limits,
    given: SimpleNamespace,
) -> int:
    """Serve copies of the server under Ray (phase 15), which is imported here; return the exit code."""
    if copies.cluster is None:
        os.environ |= {
            RAY_BEYOND_THIS_MACHINE: "0",
            "RAY_AUTH_MODE": "token",
        }  # read when Ray is imported
    from replicas.cluster import Cluster

    cluster = Cluster(make, copies, gpus, limits, host=given.host, port=given.port)
    try:
        return cluster.serve(lambda: _say_ready(cluster.host, cluster.port))
    except StartupError as error:
        raise EngineLost(f"the replicas cannot be started: {error}") from None


def _serve(app: App, given: SimpleNamespace, keyed: bool, begun: Usage | None) -> int:
    listening = listen(given.host, given.port)  # before anything slow: the port may be taken
    greet = partial(_greet, app, given.host, listening.getsockname()[1], keyed, begun)
    server = whole_server(app, on_ready=greet)
    try:
        uvloop.run(server.serve([listening]))
    finally:
        listening.close()
    if server.failure is not None:
        if isinstance(server.failure, UserError):
            raise server.failure
        raise EngineLost(f"the engine cannot be started: {server.failure}")
    return server.code


def _greet(app: App, host: str, port: int, keyed: bool, begun: Usage | None) -> None:
    """Print the memory plan, how to call the server, and what other programs have taken since `begun`."""
    freeze_collector()  # what is imported is here to stay, and looking at it stops streams for 80 ms
    ready = app.engine.ready
    if ready is not None and ready.memory_plan:
        err.print(f"[dim]{ready.memory_plan}[/dim]")
    url = _say_ready(host, port)
    key = " -H 'Authorization: Bearer KEY'" if keyed else ""
    body = f'{{"model": "{app.model.name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    out.print(
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'",
        markup=False,
        soft_wrap=True,
    )
    out.file.flush()
    if begun is not None:
        warn(begun)


def _say_ready(host: str, port: int) -> str:
    """Print the server's address and return it."""
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    url = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
    out.print(
        f"Ready: {url} (a page to look at), {url}/v1 (for OpenAI's clients)",
        markup=False,
        soft_wrap=True,
    )
    out.file.flush()
    return url
