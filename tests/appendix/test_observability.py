"""The page's events, its pictures, and the access log."""

from __future__ import annotations

import asyncio
import json

from phases.appendix.observability.live import Live
from phases.appendix.observability.log import AccessLog
from tests.servers import Client
from tests.serving_kit import engine as engine
from tests.serving_kit import extension, metrics, settle
from tests.serving_kit import make as make
from tests.serving_kit import tokenizer as tokenizer


async def test_the_log_survives_a_full_disk(make, tmp_path, monkeypatch):
    path = tmp_path / "access.log"
    app = make(access_log=str(path))
    await Client(app).post("/v1/completions", {"prompt": "a", "max_tokens": 2}, x_request_id="mine")
    (line,) = path.read_text().splitlines()
    entry = json.loads(line)
    assert entry["id"] == "mine" and entry["status"] == 200 and entry["output_tokens"] >= 1

    def full(text: str) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        extension(app, AccessLog),
        "_file",
        type("Full", (), {"write": staticmethod(full), "flush": lambda self: None})(),
    )
    assert (await Client(app).post("/v1/completions", {"prompt": "a", "max_tokens": 1}))[0] == 200
    assert metrics(app).lost_log_lines == 1


async def test_watching(make):
    """Events come while somebody looks, at most ten a second, and stop when nobody does."""
    app = make()
    watcher = Client(app).request("/events", b"", "GET")
    task = asyncio.ensure_future(watcher.run())
    await asyncio.sleep(0.05)
    body = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True}
    await Client(app).post("/v1/completions", body)
    await asyncio.sleep(0.25)
    started = len(watcher.chunks)
    await asyncio.sleep(0.5)
    assert len(watcher.chunks) - started <= 6
    events = watcher.events()
    steps = [step for event in events for step in event["steps"]]
    assert len(steps) == len({step[0] for step in steps}) > 100, "steps are missing or told twice"
    assert any(event["picture"] and event["picture"]["rows"] for event in events), "nobody was seen to run"
    watcher.leave()
    await task
    assert extension(app, Live).watchers == 0
    await settle(app)
    assert not app.engine.worker.observer.due(), "a picture is drawn for nobody"
