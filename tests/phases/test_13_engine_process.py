"""The engine process as its keeper sees it: what it takes to start one may be missing for a while."""

from __future__ import annotations

import errno
import re
import tempfile
from pathlib import Path

import pytest
import zmq

from serving import liveness
from serving.liveness import EngineProcess, StartupError
from serving.messages import Ready


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left"), zmq.ZMQError(errno.EMFILE)]
)
async def test_what_a_restart_cannot_have_at_the_moment_is_tried_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    tries = 0
    client = EngineProcess(make=object)

    def no_folder() -> Path:
        nonlocal tries
        tries += 1
        client._stopping = tries == 2
        raise error

    monkeypatch.setattr(liveness, "temporary_folder", no_folder)
    with pytest.raises(StartupError, match=re.escape(str(error))):
        await client.run()
    client.ready, tries = Ready(1, 1), 0
    await client.run()
    assert tries == 2 and client.restarts == 1
    assert str(error) in caplog.text


async def test_an_engine_that_cannot_be_started_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    deep = tmp_path / ("d" * 100)  # too long for the address of a socket
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(StartupError, match="cannot be started"):
        await EngineProcess(make=object).run()
    assert not list(deep.iterdir())
