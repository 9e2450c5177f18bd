"""Start replicas under Ray Serve, serve, and stop everything after the last stream.

Ray starts replicas, restarts them, drains them, counts queued requests, and carries requests to them. This
course adds the server in a replica (`replica`), the choice of a replica for a request (`routing`), and the
form of what clients see (`gate`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from common.errors import UserError
from common.http.limits import Limits
from common.interrupts import TERMINATED
from common.sockets import listen
from replicas.gate import LIMITS, PROTOCOL
from replicas.heartbeats import HeartbeatSender
from replicas.options import ReplicaOptions
from replicas.replica import Replica
from serving.app import App
from serving.liveness import StartupError

try:
    import ray
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig
except ImportError:
    words = "--replicas needs Ray Serve, which is not installed: pip install 'inference-ladder[replicas]'"
    raise UserError(words) from None

APPLICATION = "ladder"
OBJECT_STORE_BYTES = 100 << 20
"""Ray's memory for large objects. Requests and tokens are small ones and never get there."""
START_SECONDS = 900.0
"""Most seconds until a replica is ready, long enough to load a large model."""
HEALTH_SECONDS = 5.0
"""Seconds without a reply after which a replica is asked again; after three times Ray ends it."""
END_SECONDS = 30.0
"""Most seconds until Ray has ended after the last stream."""
TRIES = 2
"""Attempts to start a replica before the server gives up."""
REASON = re.compile(r"\b(UserError|StartupError): (.+)")
"""Finds the error that a replica has raised in Ray's message, which is a traceback."""


@dataclass
class Cluster:
    """A server of several engines: Ray, its HTTP proxy, and the replicas.

    make_app: makes phase 13's ASGI application in a replica's process; any callable that can be pickled.
    options: number of replicas, and how one is chosen for a request.
    gpus: number of GPUs of a replica; with 0 it gets what Ray counts as one processor.
    limits: of HTTP, the same as the application's. host, port: where the proxy listens.
    connection: import path of uvicorn's class for HTTP connections; empty: uvicorn's own.
    signalled: event that is set by the first SIGTERM or SIGINT.
    """

    make_app: Callable[[], App]
    options: ReplicaOptions
    gpus: int
    limits: Limits
    host: str
    port: int
    connection: str = ""

    def __post_init__(self) -> None:
        """Choose a free port, if `port` is 0, and reserve it for Ray; `UserError` if the port is taken."""
        self.signalled = threading.Event()
        # Better said now than in Ray's log.
        with listen(self.host, self.port) as found:
            address = found.getsockname()
            self.port = int(address[1])
        # Ray listens there some seconds later: until then no other process shall get the port.
        self._kept = socket.socket(found.family)
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # as Ray's own socket
            self._kept.setsockopt(socket.SOL_SOCKET, option, 1)
        self._kept.bind(address)

    def serve(self, on_ready: Callable[[], object]) -> int:
        """Start Ray and all replicas, serve until a signal, and end all; return the exit code, 0.

        on_ready: called when all replicas take requests. The first signal lets streams finish, within
            `limits.grace_seconds`; the second ends this process at once.

        Raises:
            StartupError: not every replica takes requests in time.
            UserError: there is no such Ray cluster, or no replica can be made with these options.
        """
        try:
            self._start()
            self._deploy()
            on_ready()
            while not self.signalled.wait(0.5):
                pass
        finally:
            self.stop()
        return 0

    def stop(self) -> None:
        """Wait for streams, at most `limits.grace_seconds`, and stop Ray; end this process if Ray hangs."""
        if not ray.is_initialized():
            return
        watchdog = threading.Timer(
            self.limits.grace_seconds + END_SECONDS, os._exit, (TERMINATED,)
        )
        watchdog.daemon = True
        watchdog.start()
        with suppress(Exception):
            serve.delete(APPLICATION)  # waits for the streams, within their grace period
        if self.options.cluster is None:  # a cluster may serve others' applications as well
            with suppress(Exception):
                serve.shutdown()
        ray.shutdown()
        watchdog.cancel()

    def _start(self) -> None:
        os.environ |= self._environment()
        quiet = {"configure_logging": False, "log_to_driver": False}
        if self.options.cluster is None:
            ray.init(
                num_cpus=self.options.most + 1,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                **quiet,
            )
        else:
            try:
                ray.init(address=self.options.cluster, **quiet)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise UserError(
                    f"cluster {self.options.cluster!r} is not to be had: {error}"
                ) from None
        for number in (signal.SIGTERM, signal.SIGINT):
            # Not before: Ray takes them over, to print a trace and abort.
            signal.signal(number, self._hear)
        # A replica is the first to say that a request took too long.
        options = {"request_timeout_s": self.limits.max_seconds + 5}
        try:
            serve.start(
                proxy_location="HeadOnly" if self.options.cluster is None else "EveryNode",
                http_options={"host": self.host, "port": self.port, **options},
                logging_config={"log_level": "WARNING", "enable_access_log": False},
            )
        except Exception as error:  # of many kinds, none of them documented
            raise StartupError(f"Ray Serve's proxy: {error}") from error

    def _hear(self, number: int, frame: object) -> None:
        if self.signalled.is_set():
            os._exit(TERMINATED)
        self.signalled.set()

    def _environment(self) -> dict[str, str]:
        """Return the environment variables that Ray's processes need, by name.

        In a cluster of several machines, `ray start` on the other machines needs the same variables.
        """
        cores = max(1, (os.cpu_count() or 1) // self.options.most)  # of a replica
        return {
            "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "replicas.gate.middlewares",
            LIMITS: json.dumps(asdict(self.limits)),
            PROTOCOL: self.connection,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(cores),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # a busy machine is slow, not broken
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a replica without a GPU sees those that are there
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(path for path in sys.path if path)),
        }

    def _deploy(self) -> None:
        needed = self.options.replicas * self.gpus
        there = ray.cluster_resources().get("GPU", 0.0)
        if needed > there:  # Ray would wait for them
            raise UserError(
                f"replicas is {self.options.replicas}, which takes {needed:g} GPUs of {there:g}"
            )
        target = serve.RunTarget(self._application(), name=APPLICATION, route_prefix="/")
        serve.run_many([target], wait_for_applications_running=False)
        end = time.monotonic() + START_SECONDS
        state = message = ""
        while state not in ("RUNNING", "DEPLOY_FAILED") and time.monotonic() < end:
            if self.signalled.wait(0.2):
                raise SystemExit(TERMINATED)
            state, message = self._state()
        if state == "DEPLOY_FAILED":
            found = REASON.findall(message)
            kind, reason = found[-1] if found else ("", message[-600:])
            raise UserError(reason) if kind == "UserError" else StartupError(reason)
        if state != "RUNNING":
            raise StartupError(f"not ready after {START_SECONDS:g} s: {message or state}")

    def _state(self) -> tuple[str, str]:
        """Return the status of Ray's application, such as "RUNNING", and its messages, as one text."""
        found = serve.status().applications.get(APPLICATION)
        if found is None:
            return "DELETED", ""
        said = [
            deployment.message
            for deployment in found.deployments.values()
            if deployment.message
        ]
        return str(found.status.value), "\n".join([*said, found.message])

    def _application(self) -> Any:
        """Return the Ray Serve application (a bound deployment) that describes a replica and its router."""
        options, make_app = self.options, self.make_app
        # In the replica's process: Ray asks for the application in two steps.
        made: list[Replica] = []

        class Actor:
            async def __init__(self) -> None:  # type: ignore[misc]
                made.append(
                    Replica(make_app(), serve.get_replica_context().replica_id.unique_id)
                )
                await made[0].start()

            def check_health(self) -> None:
                made[0].check_health()

        def application() -> Any:
            return HeartbeatSender(made[0])

        more: dict[str, Any] = {"num_replicas": options.replicas}
        if options.most > options.replicas:
            more = {
                "autoscaling_config": AutoscalingConfig(
                    min_replicas=options.replicas,
                    max_replicas=options.most,
                    target_ongoing_requests=options.queue,
                    upscale_delay_s=options.patience,
                    downscale_delay_s=options.patience,
                    look_back_period_s=options.patience,
                    metrics_interval_s=options.patience / 2,
                )
            }
        deployment = serve.deployment(
            serve.ingress(application)(Actor),
            max_ongoing_requests=self.limits.max_connections,  # the server in it has limits of its own
            ray_actor_options={"num_cpus": 0 if self.gpus else 1, "num_gpus": self.gpus},
            request_router_config=RequestRouterConfig(
                request_router_class="replicas.router.Router",
                request_router_kwargs={"route": options.route, "imbalance": options.imbalance},
            ),
            health_check_period_s=1.0,
            health_check_timeout_s=HEALTH_SECONDS,
            graceful_shutdown_timeout_s=self.limits.grace_seconds,
            graceful_shutdown_wait_loop_s=0.2,
            max_constructor_retry_count=TRIES,
            **more,
        )
        return deployment.bind()
