"""The engine process as its keeper sees it: what it takes to start one may be missing for a while."""

from __future__ import annotations

import errno
import re
import tempfile
from pathlib import Path

import pytest
import zmq

from common.sampling.params import SamplingParams
from forward.model import Model
from serving import liveness
from serving.liveness import EngineProcess, StartupError
from serving.messages import AddRequest, Ready
from serving.worker import Worker
from tests.guidance_kit import served
from tests.servers import Lists


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


def test_each_completion_of_a_command_is_one_request_with_its_settings(model: Model):
    channel = Lists()
    worker = Worker(served(model, speculate=False), channel)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=3, n=2, seed=4, ignore_eos=True)
    channel.commands = [AddRequest(7, [1, 2], params, priority=5, salt="a")]
    worker.turn()
    assert [*worker.live] == [7, 8], "the command asks for completions 7 and 8"
    for number, request in worker.live.items():
        found = request.sample, request.priority, request.salt
        assert found == (number - 7, 5, "a"), (
            f"completion {number} is sample {number - 7}, of priority 5 and salt 'a', not {found}"
        )
    requests = {**worker.live}
    while not worker.engine.idle:
        worker.turn()
    for number, request in requests.items():
        told = [
            token
            for step in channel.steps
            for one, token in zip(step.numbers, step.tokens, strict=True)
            if one == number
        ]
        assert told == request.output_ids, f"completion {number} is told {told}"
        ends = [
            end.reason for step in channel.steps for end in step.ends if end.number == number
        ]
        assert ends == ["length"], f"completion {number} is told ends {ends}"
