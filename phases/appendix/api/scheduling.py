"""Request fields for the scheduler: priority, deadline, and who may share a request's cached blocks."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from common.http.errors import wrong
from common.sampling.params import MAX_INT
from serving.parsed import ParsedRequest


class SchedulingFields(Struct, kw_only=True):
    """Request fields `priority` and `cache_salt`, as vLLM has them, and `deadline_ms` (milliseconds)."""

    priority: Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)] | None = None
    cache_salt: str | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None


class SchedulingHandler:
    """Handles the request fields `priority`, `cache_salt` and `deadline_ms`."""

    fields = SchedulingFields
    names = frozenset(SchedulingFields.__struct_fields__)

    def read(self, given: SchedulingFields, request: ParsedRequest) -> None:
        """Set a request's priority, deadline, and salt: requests of one salt share cached blocks.

        given: the fields, as the client has sent them.

        Raises:
            ApiError: a priority other than 0 is given, but the server schedules first come, first served.
        """
        policy = request.ready.policy
        if given.priority and policy != "priority":
            rest = f"must be 0: the server's policy is {policy}"
            raise wrong("priority", f"priority is {given.priority}, but {rest}")
        request.options |= {"priority": given.priority or 0, "salt": given.cache_salt or ""}
        if given.deadline_ms is not None:
            request.seconds = given.deadline_ms / 1e3
