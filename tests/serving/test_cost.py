"""Cost before limits: what a request costs before it is refused, and what a bystander sees of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.servers import Running

MIB = 1 << 20
ATTACKS: dict[str, tuple[str, dict[str, Any], int]] = {
    "a prompt of 4 MB": ("/v1/completions", {"prompt": "a" * (4 * MIB - 100), "max_tokens": 1}, 400),
    "a conversation of 4 MB": ("/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a " * (2 * MIB - 100)}]}, 400),
    "a bias of 250,000 keys": ("/v1/completions", {"prompt": "a", "logit_bias": dict.fromkeys(map(str,
        range(250_000)), 1)}, 400),
    "metadata of a million": ("/v1/completions", {"prompt": "a", "metadata": [{}] * 1_000_000}, 400),
    "2,000,000 token ids": ("/v1/completions", {"prompt": [1] * 2_000_000, "max_tokens": 1}, 400),
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    sizes = ("--max-rows", "8", "--max-len", "1024", "--cache-bytes", "8000000")
    with Running(*sizes, "--access-log", "none") as running:
        yield running
        running.settle()


class Bystander(threading.Thread):
    """A stream, and another one when it has ended, whose longest gap between two chunks is taken."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.gaps = list[float]()
        self.reads = threading.Event()
        self.done = threading.Event()

    def run(self) -> None:
        body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}
        last = time.perf_counter()
        while not self.done.is_set():
            with httpx.stream(
                "POST", f"{self.url}/v1/completions", json=body, timeout=60
            ) as answer:
                for _ in answer.iter_raw():
                    now = time.perf_counter()
                    self.gaps.append(now - last)
                    last = now
                    self.reads.set()
                    if self.done.is_set():
                        return

    def longest(self) -> float:
        """The longest gap since the last call."""
        gaps, self.gaps = self.gaps, []
        return max(gaps, default=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_a_bystander_goes_on_beside_one_large_request(server: Running, name: str) -> None:
    """Other tests run beside this one on two cores: the best of five tries counts. By itself none of these is
    over 100 ms.
    """
    pauses = [pause_beside(server, name)]
    while len(pauses) < 5 and min(pauses) >= 0.5:
        pauses.append(pause_beside(server, name))
    assert min(pauses) < 0.5, f"beside {name} a stream stood still for {pauses} s"


def pause_beside(server: Running, name: str) -> float:
    """Send one large request, and return for how many seconds a stream beside it stood still at most."""
    path, body, status = ATTACKS[name]
    data = json.dumps(body, separators=(",", ":")).encode()
    headers = {"content-type": "application/json"}
    bystander = Bystander(server.url)
    bystander.start()
    try:
        assert bystander.reads.wait(60), "a stream has no chunk after 60 s"
        bystander.longest()
        told = httpx.post(
            f"{server.url}{path}", content=data[: 4 * MIB], headers=headers, timeout=60
        )
        bystander.reads.clear()
        assert bystander.reads.wait(60), "a stream has no further chunk after 60 s"
        longest = bystander.longest()
    finally:
        bystander.done.set()
        bystander.join()
    assert told.status_code in (status, 413), f"{name}: {told.status_code} {told.text[:200]}"
    return longest
