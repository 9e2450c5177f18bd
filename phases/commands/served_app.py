"""The API process of `ladder serve`: the application around an engine process, and what it prints."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from common.collector import freeze_collector
from common.console import err, out
from common.errors import EngineLost
from common.neighbours import Usage, warn
from common.sampling.defaults import sampling_defaults
from common.text.tokenizer import Tokenizer
from phases.appendix.access.options import hosts, names_of, origins
from phases.appendix.connections.server import HttpServer
from phases.appendix.server import whole_app
from phases.commands.arguments import joined
from phases.commands.plain import version
from serving.app import App
from serving.client import EngineClient
from serving.liveness import StartupError


def make_app(engine: EngineClient, folder: Path, given: SimpleNamespace) -> App:
    """Return the ASGI application for an engine that is not started yet.

    folder: of the tokenizer.
    given: the command line's arguments, with attributes made from them: `limits` (of requests) and `keys`
        (API keys).
    """
    return whole_app(
        engine,
        Tokenizer(folder),
        given.name,
        defaults=sampling_defaults(folder, given.generation_config),
        limits=given.limits,
        keys=given.keys,
        allowed_origins=origins(joined(given.allowed_origins)),
        hosts=names_of(given.host, hosts(joined(given.allowed_hosts)), keys=bool(given.keys)),
        access_log=given.access_log,
        version=version(),
    )


async def serve(
    engine: EngineClient,
    running: asyncio.Future[None],
    folder: Path,
    given: SimpleNamespace,
    listening: socket.socket,
    begun: Usage,
) -> int:
    """Serve at a socket until SIGINT or SIGTERM, and return the exit code.

    running: the task that runs the engine. folder: of the tokenizer.
    given: the command line's arguments, with attributes made from them: `limits` (of requests) and `keys`
        (API keys).
    listening: the socket. begun: a reading of processor time when the command began.

    Raises:
        EngineLost, UserError: the engine cannot be started.
    """
    app = make_app(engine, folder, given)
    server = HttpServer(app, on_ready=partial(_greet, app, given, begun))
    try:
        await server.serve([listening], running)
    except StartupError as error:
        raise EngineLost(f"the engine cannot be started: {error}") from None
    return server.code


def _greet(app: App, given: SimpleNamespace, begun: Usage) -> None:
    """Print the memory plan, how to call the server, and a warning if other programs take much of the CPU.

    given: the arguments of the command line. begun: a reading of processor time when the command began.
    """
    freeze_collector()  # what is imported is here to stay, and looking at it stops streams
    ready = app.engine.ready
    if ready is not None and ready.memory_plan:
        err.print(f"[dim]{ready.memory_plan}[/dim]")
    url = say_ready(given.host, given.port)
    key = " -H 'Authorization: Bearer KEY'" if given.keys else ""
    body = f'{{"model": "{app.model.name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    out.print(
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'",
        markup=False,
        soft_wrap=True,
    )
    out.file.flush()
    if ready is not None and ready.device == "cpu":
        warn(begun)


def say_ready(host: str, port: int) -> str:
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
