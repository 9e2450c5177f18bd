#!/usr/bin/env bash
# uvicorn's two HTTP/1.1 servers, asked with HTTP/1.0 for an answer that has no content-length.
# Expected: no Transfer-Encoding, which HTTP/1.0 does not know (RFC 9112, 6.1: a server must not send it there); the end
#   of the connection ends the body. --http h11 does that.
# Instead: with --http httptools, the faster one and the default where httptools is installed, the answer is chunked: a
#   client of HTTP/1.0 reads sizes of chunks as part of the body.
# Known since: uvicorn 0.20.0 at least, 0.54.0 still. 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet uvicorn==0.54.0 httptools==0.9.0 h11==0.16.0
"$folder/env/bin/python" - <<'PYTHON'
import asyncio

import uvicorn


async def app(scope, receive, send) -> None:
    """Send a body in two parts, of a length that is not told."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"first ", "more_body": True})
    await send({"type": "http.response.body", "body": b"second"})


async def asked(http: str) -> bytes:
    """The whole answer to one request of HTTP/1.0."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, http=http, lifespan="off", log_level="error"))
    running = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    answer = await reader.read()
    writer.close()
    server.should_exit = True
    await running
    return answer


bodies = {}
for http in ("h11", "httptools"):
    head, _, bodies[http] = asyncio.run(asked(http)).partition(b"\r\n\r\n")
    print("uvicorn", uvicorn.__version__, http, "chunked:", b"transfer-encoding" in head.lower(), bodies[http])
if bodies != {"h11": b"first second", "httptools": b"6\r\nfirst \r\n6\r\nsecond\r\n0\r\n\r\n"}:
    raise SystemExit("this has changed: see the head of this script")
PYTHON
