"""`ladder serve`: an engine behind HTTP."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import uvloop

from common.console import err, out
from common.device import pick_device, pick_dtype
from common.errors import UserError, integer
from common.text.tokenizer import Tokenizer
from phases import Phase
from phases.commands.fetch import fetch_with_progress
from phases.config import options_from_yaml
from phases.registry import ROWS, check_options, load_engine, missing_for, phase_named
from serving.alive import EngineProcess
from serving.app import App
from serving.http.limits import Limits
from serving.http.server import Server, listen
from serving.made_up import RANDOM, made_up_tokenizer
from serving.versions.one_at_a_time import OneAtATime

KEY = "LADDER_API_KEY"


def run(
    model: str,
    *,
    phase_name: str = "13",
    host: str,
    port: int,
    api_key: str | None,
    name: str | None,
    strict: bool,
    access_log: str,
    device: str,
    dtype: str,
    config: Path | None,
    limits: Mapping[str, Any],
    options: Mapping[str, Any],
) -> int:
    """Serve until a signal; returns the exit code.

    limits: fields of `Limits`.
    options: of the engine; they come before what the file says.
    """
    phase = phase_named(phase_name)
    given = {**(options_from_yaml(config) if config else {}), **options}
    checked = Limits(**limits)
    where = pick_device(device)
    pick_dtype(dtype, where)
    integer("port", port, low=0, high=65_535)
    check_options(phase, given, where)
    missing = missing_for(phase, where)
    if missing:
        err.print(f"[dim]{phase.name} runs in an interpreter or not at all here: it needs {missing}[/dim]")
    folder = made_up_tokenizer(model) if model.startswith(RANDOM) else fetch_with_progress(model)
    try:
        source = model if model.startswith(RANDOM) else str(folder)
        make = partial(make_engine, phase, source, str(folder), device, dtype, dict(given))
        app = App(
            EngineProcess(make),
            Tokenizer(folder),
            name or model,
            limits=checked,
            keys=_keys(api_key),
            strict=strict,
            access_log=access_log,
            version=metadata.version("inference-ladder"),
        )
        return _serve(app, host, port)
    finally:
        if model.startswith(RANDOM):
            shutil.rmtree(folder, ignore_errors=True)


def make_engine(
    phase: Phase, model: str, folder: str, device: str, dtype: str, options: dict[str, Any]
) -> Any:
    """Make the engine, in its own process. Phases that take no requests while they run serve one by one."""
    tokenizer = Tokenizer(folder)
    engine = load_engine(phase, model, device=device, dtype=dtype, tokenizer=tokenizer, **options)
    return engine if phase.number >= ROWS else OneAtATime(engine)


def _keys(api_key: str | None) -> tuple[str, ...]:
    """The keys that are taken: `--api-key`, or the environment's, which `ps` does not show."""
    given = os.environ.get(KEY, "") if api_key is None else api_key
    keys = tuple(key.strip() for key in given.split(",") if key.strip())
    if api_key is not None and not keys:
        raise UserError("--api-key is empty, but must have at least 1 character")
    return keys


def _serve(app: App, host: str, port: int) -> int:
    listening = listen(host, port)  # before anything slow: the port may be taken
    server = Server(app, on_ready=partial(_greet, app, host, listening.getsockname()[1]))
    try:
        uvloop.run(server.serve([listening]))
    finally:
        listening.close()
    if server.failure is not None:
        if server.failure.wrong_input:
            raise UserError(str(server.failure))
        err.print(f"error: the engine cannot be started: {server.failure}", markup=False)
        return 1
    return server.code


def _greet(app: App, host: str, port: int) -> None:
    """The memory, and how to call it."""
    ready = app.engine.ready
    if ready is not None and ready.ledger:
        err.print(f"[dim]{ready.ledger}[/dim]")
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    url = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
    key = " -H 'Authorization: Bearer KEY'" if app.keys else ""
    body = f'{{"model": "{app.model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    out.print(
        f"Ready: {url} (a page to look at), {url}/v1 (for OpenAI's clients)", markup=False, soft_wrap=True
    )
    out.print(
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'",
        markup=False,
        soft_wrap=True,
    )
    out.file.flush()
