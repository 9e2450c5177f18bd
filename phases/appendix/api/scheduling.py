"""When a request is served, and beside whom: its priority, its deadline, and who may share its blocks."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from common.http.errors import wrong
from common.sampling.params import MAX_INT
from serving.parsed import ParsedRequest


class SchedulingFields(Struct, kw_only=True):
    """Request fields for the scheduler: vLLM's `priority` and `cache_salt`, and `deadline_ms`."""

    priority: Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)] | None = None
    cache_salt: str | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None


class SchedulingHandler:
    """Handles the request fields `priority`, `cache_salt` and `deadline_ms`."""

    fields = SchedulingFields
    names = frozenset(SchedulingFields.__struct_fields__)

    def read(self, given: SchedulingFields, request: ParsedRequest) -> None:
        """Set a request's place in the waiting line, its salt (who may share its cached blocks) and its
        deadline.

        Raises:
            ApiError: a priority is given, but the server schedules first come, first served.
        """
        policy = request.ready.policy
        if given.priority and policy != "priority":
            rest = f"must be 0: the server's policy is {policy}"
            raise wrong("priority", f"priority is {given.priority}, but {rest}")
        request.options |= {"priority": given.priority or 0, "salt": given.cache_salt or ""}
        if given.deadline_ms is not None:
            request.seconds = given.deadline_ms / 1e3
