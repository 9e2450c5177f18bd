"""The end of `ladder demo`: the same model behind HTTP, asked as `curl` and as OpenAI's client would."""

from __future__ import annotations

import json
import urllib.request
from importlib.util import find_spec

from rich.rule import Rule

from benchmarks.server import Server
from common.console import out
from phases import PHASES

QUESTION = "Name the capital of France."
SERVING = 13
MAX_TOKENS = 24


def run(model: str, device: str, dtype: str) -> int:
    """Start the server, ask it twice, say where its page is, and stop. Nothing without phase 13."""
    if not any(phase.number == SERVING for phase in PHASES):
        return 0
    out.print(Rule("and over HTTP", align="left", style="dim"))
    with Server(model, device=device, dtype=dtype) as server:
        url = f"http://{server.target.host}:{server.target.port}"
        body = {
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
        }
        shown = json.dumps(body)
        out.print(
            f"[dim]curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{shown}'[/dim]"
        )
        out.print(_curl(url, body).strip(), markup=False)
        if find_spec("openai"):
            out.print("[dim]openai.OpenAI(base_url=...).chat.completions.create(..., stream=True)[/dim]")
            out.print(_client(url, body).strip(), markup=False)
        out.print(f"[dim]The page at {url} shows a chat and the engine; `make serve` keeps it open.[/dim]")
    return 0


def _curl(url: str, body: dict[str, object]) -> str:
    """Return the call of `curl`, and the answer's text."""
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{url}/v1/chat/completions", data, headers)
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def _client(url: str, body: dict[str, object]) -> str:
    """The same with OpenAI's own client, streamed."""
    import openai

    client: object = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    stream = client.chat.completions.create(model=None, stream=True, **body)  # type: ignore[attr-defined]
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
