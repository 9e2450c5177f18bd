"""Middleware around Ray's HTTP proxy: it reads a request's body, and gives errors the server's form.

The proxy sends a replica the request's head (address and headers), and the replica fetches the body
afterwards. A router in between would have to choose without having seen the prompt. So the body is read
before the proxy sees the request, and travels with its head: the router can look at it, and a round trip
between replica and proxy is saved.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from common.http.errors import ApiError, error_body, not_found
from common.http.limits import Limits
from common.json_text import encode_json
from replicas.heartbeats import ASSIGNMENTS, BEAT_SECONDS, Watch
from replicas.prefixes import chain_of, keeper_of
from serving.http.request import ClientDisconnected, HttpRequest, Receive, Scope, Send

log = logging.getLogger(__name__)

KEY = "ladder"
"""Of what travels in a request's scope."""
NOTES: dict[str, Any] = {"number": -1, "chain": [], "body": b"", "wanted": "", "avoid": []}
"""What travels there: the proxy's number of the request, hashes of its beginnings, its body, the name of the
replica to be asked, and of those to be avoided."""
NAME = b"x-ladder-replica"
"""Header of an answer: the replica that gave it. Of a GET: the one that is asked."""
LIMITS = "LADDER_LIMITS"
"""Environment: the limits, as JSON; a proxy is started by Ray and has no other way to learn them."""
PROTOCOL = "LADDER_HTTP_PROTOCOL"
"""Environment: the class of connections, as uvicorn names one."""
ENGINE_LOST = b"x-ladder-engine-lost"
"""Header of a replica whose engine has died: it has sent nothing of a response, so another may be asked."""
LOST = "the replica has ended; try again"
TRIES = 3
"""Replicas that a request is given to, one after the other, while nothing of an answer has come."""


class Gate:
    """ASGI middleware in Ray's proxy, around its application `app`, which sends each request to a replica.

    limits: of HTTP; None: the default ones.
    """

    def __init__(self, app: Any, limits: Limits | None = None) -> None:
        self.app, self.limits = app, limits or Limits()
        self._numbers = count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one HTTP request: by a replica, or with an error if no replica can."""
        if scope["type"] != "http" or scope["path"].startswith("/-/"):  # Ray's own
            await self.app(scope, receive, send)
            return
        scope.pop("state", None)  # of the connection: it stays here
        http, leaving = HttpRequest(scope, receive, send, self.limits), Leaving(receive)
        # One that the server takes: Ray, which reads it too, fails at bytes that are no UTF-8.
        others = [header for header in scope["headers"] if header[0] != b"x-request-id"]
        scope["headers"] = [*others, (b"x-request-id", http.id.encode())]

        async def timed(message: MutableMapping[str, Any]) -> None:
            """Send an ASGI message to the client; one that is too slow to take it counts as disconnected.

            Raises:
                ConnectionError: the client has not taken the message in time.
            """
            try:
                async with asyncio.timeout(self.limits.slow_seconds):
                    await send(message)
            except TimeoutError:
                leaving.disconnected = True
                raise ConnectionError("the reader is too slow") from None

        number = next(self._numbers)
        said = NOTES | {"number": number, "avoid": []}
        try:
            most = self.limits.max_header_bytes  # Ray's server has no limit of its own
            if head_bytes(scope) > most:
                raise ApiError(431, f"address and headers have more than {most:,} bytes")
            if http.path == "*":  # of OPTIONS; to Ray no application has it
                raise not_found(http.path, ())
            if http.method == "POST":
                said["body"] = body = await http.body()
                said["chain"] = chain_of(body)
                said["wanted"] = keeper_of(body)
            else:
                said["wanted"] = http.headers.get(NAME, b"").decode("latin-1")
            await self._answer(http, said, leaving, timed)
        except ApiError as error:
            await http.fail(error)
        except ClientDisconnected:
            return
        finally:
            ASSIGNMENTS.replicas.pop(number, None)

    async def _answer(
        self, http: HttpRequest, said: dict[str, Any], leaving: Leaving, send: Send
    ) -> None:
        """Ask up to `TRIES` replicas, one after the other, until one has sent a complete response.

        said: what the router gets to know, such as `chain`, `wanted` and `avoid`; each replica is asked with
            the scope and `said` in it under `KEY`. leaving: the client's messages. send: sends to the client.
            Each response goes through a new `RelayedAnswer`; `http` gets its status. The function returns
            when the response is complete, or the client has left. Another replica is asked only if no part of
            a response was sent to the client, and Ray itself has made none. The replica that failed,
            `lost_replica`, is first appended to the list `said["avoid"]`.

        Raises:
            ApiError: the last answer's `error()`: nothing has been sent, or Ray itself has responded.
            ConnectionError: a part of a response has been sent, so that the connection must be cut. A stream
                of events is not cut: it gets the error as its last event, `data: `, the error as JSON, an
                empty line.
        """
        for _ in range(TRIES):
            answer = RelayedAnswer(send)
            await answer.of(self.app, dict(http.scope) | {KEY: said}, leaving)
            http.status = answer.status
            if answer.complete or leaving.disconnected:
                return
            if answer.status or answer.foreign:
                break
            said["avoid"].append(answer.lost_replica)
        if answer.foreign or not answer.status:
            raise answer.error()
        if not answer.events:
            raise ConnectionError(LOST)  # the server around us cuts the connection
        data = b"data: " + encode_json(error_body(answer.error())) + b"\n\n"
        await send({"type": "http.response.body", "body": data, "more_body": False})


def head_bytes(scope: Scope) -> int:
    """Return the number of bytes of a request's address (path and query) and headers."""
    address = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    return address + sum(len(name) + len(value) for name, value in scope["headers"])


@dataclass
class Leaving:
    """An ASGI `receive` around another that sets `disconnected` once the client has disconnected."""

    _receive: Receive
    disconnected: bool = False

    async def __call__(self) -> MutableMapping[str, Any]:
        """Return the next ASGI message of the inner `receive`."""
        message = await self._receive()
        self.disconnected |= message["type"] == "http.disconnect"
        return message


class RelayedAnswer:
    """The response of one replica, on its way to the client. send: sends ASGI messages to the client.

    status: of the response, once its start was sent to the client; 0 before.
    complete: whether all of the response was sent.
    events: whether the response is a stream of server-sent events, to which an error can be added.
    foreign: the status of a response that Ray itself made, else 0; such a response is not sent on.
    lost_replica: the name of the replica that did not respond; empty if there is none.
    """

    status = 0
    complete = False
    events = False
    foreign = 0
    lost_replica = ""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def of(self, app: Any, scope: Scope, receive: Receive) -> None:
        """Let the ASGI application `app` respond to one request, and pass the response on by `send`.

        If the replica dies, or sends nothing any more, this returns without an exception; `complete` is False
        then, and `lost_replica` is set if the replica was silent.
        """
        watch = Watch(scope[KEY].get("number", -1))
        task = asyncio.ensure_future(app(scope, receive, partial(watch.pass_on, self.send)))
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=BEAT_SECONDS)
                if not task.done() and (name := watch.silent(begun=self.status != 0)):
                    log.warning("replica %s says nothing, so it is asked no more", name)
                    self.lost_replica = name
                    ASSIGNMENTS.suspect(name)
                    return
            if not task.cancelled() and (error := task.exception()) is not None:
                log.warning("a replica has not answered to the end", exc_info=error)
        finally:
            ASSIGNMENTS.replicas.pop(watch.number, None)
            task.cancel()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send the next ASGI message of a response on to the client, and set this object's fields.

        A start message with the header `ENGINE_LOST`: the replica's engine has ended, so `lost_replica` is
        set. A start without the header `NAME`: Ray itself responds, so `foreign` is set to the status.
        Nothing of these two kinds of responses is sent on.
        Any other start sets `status`, and sets `events` if its `content-type` begins with
        `text/event-stream`. The last body message sets `complete`.
        """
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])  # Ray adds the request's id a second time
            message = {**message, "headers": [*headers.items()]}
            if ENGINE_LOST in headers:
                self.lost_replica = headers[NAME].decode()
            elif NAME not in headers:
                self.foreign = message["status"]
            else:
                self.status = message["status"]
                self.events = headers.get(b"content-type", b"").startswith(
                    b"text/event-stream"
                )
        if not self.status:
            return
        await self._send(message)
        if message["type"] == "http.response.body":
            self.complete = not message.get("more_body", False)

    def error(self) -> ApiError:
        """Return the error that tells the client why there is no response, or not all of one."""
        if self.foreign == 408:
            return ApiError(504, "the request was not done in time", code="deadline")
        # 404: there is no application any more; 503: too many requests wait in the proxy.
        if self.foreign:
            return ApiError(
                503, "no replica takes requests now; try again", code="unavailable"
            )
        return ApiError(503, LOST, code="died")


def middlewares() -> list[Any]:
    """Return the middleware of Ray's proxy, a list with `Gate`; Ray calls this in the proxy's process."""
    import uvicorn.config
    from starlette.middleware import Middleware

    if protocol := os.environ.get(PROTOCOL):  # Ray has no option for it
        uvicorn.config.HTTP_PROTOCOLS["auto"] = protocol
    return [Middleware(Gate, limits=Limits(**json.loads(os.environ.get(LIMITS, "{}"))))]
