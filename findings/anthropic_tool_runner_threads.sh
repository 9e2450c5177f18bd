#!/usr/bin/env bash
# anthropic's tool_runner, which runs tools in a loop over /v1/messages.
# Expected: each request has the whole conversation and the tools, for the protocol has no state.
# Instead: the first one has "thread": {"type": "create"}, and the second one only what is new, without tools. A server
#   that ignores fields which it does not know answers to a bare result of a call. The runner sends everything only
#   after a 400 whose error.details.error_code is "thread_unsupported_request", or with thread=False.
# Known since: anthropic 2.2.0 (2.1.0 sends everything). 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet anthropic==2.14.0
"$folder/env/bin/python" - <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import anthropic

bodies: list[dict] = []
CALL = {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 17, "b": 25}}


class Server(BaseHTTPRequestHandler):
    """Calls the tool, then answers; `refuse` says that it keeps no threads."""

    refuse = False

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        bodies.append(body)
        if self.refuse and "thread" in body:
            details = {"error_code": "thread_unsupported_request"}
            error = {"type": "invalid_request_error", "message": "no threads", "details": details}
            return self.say(400, {"type": "error", "error": error})
        called = len(body["messages"]) > 1 or body.get("thread", {}).get("type") == "continue"
        content = [{"type": "text", "text": "42"}] if called else [CALL]
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": content}
        message |= {"stop_reason": "end_turn" if called else "tool_use", "stop_sequence": None}
        return self.say(200, message | {"usage": {"input_tokens": 1, "output_tokens": 1}})

    def say(self, status: int, value: dict) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.server_port}", api_key="none", max_retries=0)


@anthropic.beta_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def asked(**more) -> list[tuple]:
    """(thread, number of messages, whether there are tools) of each request of one loop."""
    bodies.clear()
    said = [{"role": "user", "content": "Add 17 and 25."}]
    client.beta.messages.tool_runner(model="m", max_tokens=9, tools=[add], messages=said, **more).until_done()
    return [(body.get("thread", {}).get("type"), len(body["messages"]), "tools" in body) for body in bodies]


print("anthropic", anthropic.__version__, "- (thread, messages, tools) of each request:")
kept = asked()
print("a server that knows no threads and ignores the field:", kept)
Server.refuse = True
refused = asked()
print("one that refuses it by its code:", refused)
print("thread=False:", (plain := asked(thread=False)))
if kept != [("create", 1, True), ("continue", 1, False)] or refused[0][0] != "create":
    raise SystemExit("this has changed: see the head of this script")
if refused[1:] != plain or plain != [(None, 1, True), (None, 3, True)]:
    raise SystemExit("this has changed: see the head of this script")
PYTHON
