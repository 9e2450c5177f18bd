"""Errors in the form that OpenAI's clients understand."""

from __future__ import annotations

import re
from typing import Any

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
STATUS = {"refused": 400, "error": 500, "nan": 500, "died": 503, "deadline": 504, "slow": 408, "left": 499}
"""Of the trouble of a group of choices."""


class ApiError(Exception):
    """A request that is not answered as it wants.

    param: the field that is wrong, if it is one.
    code: a word for programs.
    retry: seconds after which it may be tried again.
    close: the connection is of no further use.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry, self.close = status, param, code, retry, close

    @property
    def body(self) -> dict[str, Any]:
        """The object that is sent."""
        return {
            "error": {
                "message": str(self),
                "type": TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that belong to it."""
        found: list[tuple[bytes, bytes]] = []
        if self.retry is not None:
            found.append((b"retry-after", str(self.retry).encode()))
        if self.close:
            found.append((b"connection", b"close"))
        return found


def of_user_error(error: Exception, fields: frozenset[str] | tuple[str, ...]) -> ApiError:
    """Status 400 for a `UserError`, whose message begins with the field's name."""
    message = str(error)
    word = re.match(r"\w+", message)
    param = word[0] if word and word[0] in fields else None
    long = "must have at most" in message and message.startswith("the prompt has")
    return ApiError(400, message, param=param, code="context_length_exceeded" if long else None)
