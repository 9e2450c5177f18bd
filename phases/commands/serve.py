"""`ladder serve`: serve an engine by HTTP, from two processes that start side by side.

The engine process is launched before anything slow is imported here. This process, which speaks HTTP, imports
no PyTorch. `served_engine` has the code of the engine process, and `served_app` that of the server.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvloop

from common.console import err
from common.errors import EngineLost, UserError
from common.http.limits import Limits
from common.models.hub import RANDOM, stored
from common.neighbours import Usage, usage
from common.sockets import listen
from common.temporary import temporary_folder
from phases import first_phases
from phases.commands.arguments import joined
from phases.commands.served_engine import fetch, make_engine, make_observer
from serving.liveness import EngineProcess

KEY = "LADDER_API_KEY"


def run(given: SimpleNamespace) -> int:
    """Run `ladder serve`: serve a model until SIGINT or SIGTERM, and return the exit code.

    given: the arguments of the command line; `options` are those of the engine, of `Limits`, and of
        `ReplicaOptions`.
    """
    begun, of_engine = usage(), first_phases()
    own = {name: value for name, value in given.options.items() if name in of_engine}
    others = {name: value for name, value in given.options.items() if name not in of_engine}
    limits = {
        each.name: others.pop(each.name) for each in fields(Limits) if each.name in others
    }
    given.limits = Limits(**limits)
    given.keys = _keys(given.api_key)
    given.name = given.name or given.model
    made = (given.phase, own, given.device, given.dtype)
    if others:  # of phase 15, whose import takes seconds
        from phases.commands.served_replicas import replica_options, serve_replicas

        copies = replica_options(others)
        if copies is not None:
            folder = _folder_of(given.model, made)  # fetched once, before all of them ask
            make = partial(engine_process, given.model, folder, made, given.prefill_device)
            return serve_replicas(given, folder, make, copies, made)
    listening = listen(given.host, given.port)  # before anything slow: the port may be taken
    try:
        given.port = listening.getsockname()[1]
        err.print(f"Starting {given.model} on port {given.port}", markup=False, soft_wrap=True)
        folder = _folder_of(given.model, made)
        return uvloop.run(_serve(folder, made, given, listening, begun))
    finally:
        listening.close()


async def _serve(
    folder: Path,
    made: tuple[Any, ...],
    given: SimpleNamespace,
    listening: socket.socket,
    begun: Usage,
) -> int:
    """Start the engine's process, then serve at a socket until SIGINT or SIGTERM; return the exit code.

    folder: of the tokenizer. made: (phase, engine options, device, dtype). listening: the socket.
    given: the arguments of the command line. begun: a reading of processor time when the command began.
    """
    engine = engine_process(given.model, folder, made, given.prefill_device)
    running = asyncio.ensure_future(engine.run())
    await asyncio.sleep(0)  # until its process runs
    from phases.commands.served_app import serve

    return await serve(engine, running, folder, given, listening, begun)


def engine_process(
    model: str, folder: Path, made: tuple[Any, ...], prefill_device: str | None = None
) -> EngineProcess:
    """Return the engine's process, which is not started yet.

    folder: of the tokenizer and, unless they are random, of the weights.
    made: (phase, engine options, device, dtype).
    prefill_device: of a second engine, which computes prompts (phase 19); None: there is none.
    """
    source = model if model.startswith(RANDOM) else str(folder)
    make = partial(make_engine, source, str(folder))
    if prefill_device is not None:  # its import takes seconds
        from phases.commands.served_split import split_engine

        return split_engine(make, made, prefill_device)
    return EngineProcess(partial(make, *made), observer=make_observer)


def _folder_of(model: str, made: tuple[Any, ...]) -> Path:
    """Return a model's folder; a child process fetches or makes the folder if this disk has none yet.

    made: (phase, engine options, device, dtype), which the child checks first: a wrong option must not wait
        for a download, and the check needs PyTorch, which this process does not import.

    Raises:
        UserError: an option or the model is wrong.
        EngineLost: the child process ended early.
    """
    random = model.startswith(RANDOM)
    folder = None if random else stored(model)
    if folder is not None:
        return folder
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    arguments = (model, temporary_folder() if random else None, *made, sender)
    child = context.Process(target=fetch, args=arguments, daemon=True)
    child.start()
    sender.close()
    try:
        found = receiver.recv()
    except EOFError:
        raise EngineLost(f"the model {model} has not been fetched") from None
    child.join()
    if isinstance(found, UserError):
        raise found
    return Path(found)


def _keys(api_key: Sequence[str] | None) -> tuple[str, ...]:
    """Return the API keys that clients may send: of `--api-key`, else of the variable `LADDER_API_KEY`.

    Other users can see the flag in `ps`, but not the variable.

    api_key: values of the flag; None: not given.

    Returns:
        The keys; empty if neither is given: clients then need none.

    Raises:
        UserError: the flag or the variable is there, but empty.
    """
    given = os.environ.get(KEY) if api_key is None else joined(api_key)
    if given is None:
        return ()
    keys = tuple(key.strip() for key in given.split(",") if key.strip())
    if not keys:  # an open server must be asked for by no key at all
        name = KEY if api_key is None else "--api-key"
        raise UserError(f"{name} is empty, but must have at least 1 character")
    return keys
