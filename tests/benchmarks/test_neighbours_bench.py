"""`ladder bench neighbours`: every way is asked beside every number of neighbours, and its noise is kept."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from benchmarks import neighbours as bench
from benchmarks.evidence import BenchOptions
from common.errors import UserError

CPU = torch.device("cpu")


class FakeDecoder:
    """Decodes at a rate that tells who was asked; its threads spin as long as its environment says."""

    def __init__(self, way: bench.Way, model: str, dtype: str) -> None:
        self.way, self.closed = way, False

    def ask(self, requests: int, seconds: float) -> float:
        return float(100 * requests + len(busy))

    def close(self) -> None:
        self.closed = True


busy: list[int] = []


@contextmanager
def fake_neighbours(count: int) -> Iterator[None]:
    busy[:] = [0] * count
    yield
    busy.clear()


def test_every_way_beside_every_neighbour(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "Decoder", FakeDecoder)
    monkeypatch.setattr(bench, "neighbours", fake_neighbours)
    found = bench.run(BenchOptions(CPU, torch.float32, quick=False, repeats=2))
    assert len(found.runs) == len(bench.WAYS) * len(bench.NEIGHBOURS) * len(bench.REQUESTS)
    for run in found.runs:
        rate = 100.0 * run.options["requests"] + run.options["neighbours"]
        assert run.metrics[bench.METRIC].samples == (rate, rate)
        assert run.options["threads"] >= 1 and run.noise["other_cpu"] >= 0
    bench.draw(found, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
    quick = bench.run(BenchOptions(CPU, torch.float32, quick=True, repeats=1))
    assert {run.variant for run in quick.runs} == {way.name for way in bench.WAYS if way.quick}


def test_a_gpu_has_no_neighbours():
    with pytest.raises(UserError, match="neighbours are about the CPU"):
        bench.run(BenchOptions(torch.device("meta"), torch.float32))


def test_a_decoder_answers_each_line_with_a_rate(monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    asked = "".join(json.dumps([requests, 0.05]) + "\n" for requests in (0, 1, 16))
    monkeypatch.setattr(sys, "stdin", io.StringIO(asked))
    bench._decode("random:tiny", "float32")
    nothing, one, sixteen = map(float, capsys.readouterr().out.split())
    assert nothing == 0.0 < one < sixteen
