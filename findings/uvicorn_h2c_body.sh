#!/usr/bin/env bash
# Expected: a server that does not speak HTTP/2 ignores the header "Upgrade: h2c" and answers the request in HTTP/1.1
# (RFC 9110, section 7.8). The HttpClient of Java sends this header with every request over plain HTTP.
# Instead: uvicorn with httptools, its default parser where that is installed, loses the request's body: the
# application gets an empty one. With h11 the body arrives.
# Reported in May 2025: https://github.com/Kludex/uvicorn/issues/2722, for a chunked body; one with a length is lost, too.
# Known since uvicorn 0.54.0 with httptools 0.9.0, 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uvicorn==0.54.0 httptools==0.9.0 h11==0.16.0
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio
import logging

import httptools
import uvicorn

BODY = b'{"prompt": "a"}'
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % len(BODY)
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAA\r\nUpgrade: h2c\r\n"
logging.disable(logging.WARNING)


async def app(scope, receive, send):
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def echoed(parser, extra):
    """Return the body of the answer of a server that sends back what the application got."""
    config = uvicorn.Config(app, port=0, http=parser, lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + extra + b"\r\n" + BODY)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    found = await asyncio.wait_for(reader.readexactly(length), 10)
    writer.close()
    server.should_exit = True
    await running
    return found


print("uvicorn", uvicorn.__version__, "httptools", httptools.__version__)
found = {}
for parser in ("h11", "httptools"):
    for name, extra in (("without", b""), ("with", UPGRADE)):
        found[parser, name] = asyncio.run(echoed(parser, extra))
        print(f"{parser}, {name} Upgrade: the application got {found[parser, name]!r}")
lost = [key for key, body in found.items() if body != BODY]
if lost != [("httptools", "with")] or found["httptools", "with"]:
    raise SystemExit("the behaviour has changed: see the lines above")
PYTHON
