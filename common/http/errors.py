"""Errors in the form that OpenAI's clients understand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""Of a status; of others "invalid_request_error" below 500, and "server_error"."""
STATUS = {
    "refused": 400,
    "error": 500,
    "nan": 500,
    "died": 503,
    "deadline": 504,
}
"""HTTP status of each kind of failure of a group of choices whose client is there to read of it."""
MAX_MESSAGE = 1000
"""Characters of an error's message: values are shortened where they are shown, and this bounds the rest."""


class ApiError(Exception):
    """An error response to an HTTP request.

    status: the HTTP status code. message: a sentence for people, cut to 1,000 characters.
    param: name of the request's field that is wrong; None: no single field is.
    code: an identifier of the error for programs; None: it has none.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message[:MAX_MESSAGE])
        self.status = status
        self.param = param
        self.code = code


def error_body(error: ApiError) -> dict[str, Any]:
    """Return an error's JSON in OpenAI's form: `error` with `message`, `type`, `param` and `code`."""
    default = "invalid_request_error" if error.status < 500 else "server_error"
    kind = TYPES.get(error.status, default)
    return {
        "error": {
            "message": str(error),
            "type": kind,
            "param": error.param,
            "code": error.code,
        }
    }


@dataclass(frozen=True)
class ErrorForm:
    """The JSON form in which a route reports errors: OpenAI's, unless its protocol has another.

    body: returns the JSON object of an `ApiError`.
    event: the bytes of an event that ends a stream with an error; `%s` is the error's JSON.
    """

    body: Callable[[ApiError], dict[str, Any]] = error_body
    event: bytes = b"data: %s\n\n"


def wrong(param: str | None, message: str) -> ApiError:
    """Return an `ApiError` (400). param: the request's field that is wrong; None: no single field is."""
    return ApiError(400, message, param=param)


def bad_prompt(field: str, message: str, place: int | None = None) -> ApiError:
    """Return an `ApiError` (400) about a prompt; its code is `context_length_exceeded` if that is too long.

    field: name of the request's field that holds the prompt. message: what is wrong with "the prompt".
    place: index of the prompt if the field is a list: the message then says `field[place]` for "the prompt".
        None: the field is one prompt.
    """
    if place is not None:
        message = message.replace("the prompt", f"{field}[{place}]", 1)
    code = "context_length_exceeded" if "must have at most" in message else None
    return ApiError(400, message, param=field, code=code)


def too_large(limit: int) -> ApiError:
    """Return an `ApiError` (413): the body has more than `limit` bytes."""
    return ApiError(413, f"the body has more than {limit:,} bytes, which is the limit")


def not_found(path: str, routes: Iterable[str]) -> ApiError:
    """Return an `ApiError` (404): `path` is none of `routes`.

    The message suggests a route that ends with the path, or that the path ends with: a client's base URL may
    lack `/v1` or have it twice.
    """
    words, asked = f"there is no {path[:100]!r} here", "/" + path.strip("/")
    for route in sorted(routes, key=len):
        if "/" not in (asked, route) and (route.endswith(asked) or asked.endswith(route)):
            words += f" (did you mean {route!r}?)"
            break
    return ApiError(404, words, code="not_found")


def too_many(field: str, count: int, limit: int, what: str) -> ApiError:
    """Return an `ApiError` (400): `field` has `count` of something (`what`), of which `limit` are allowed."""
    return wrong(field, f"{field} has {count:,} {what}, but may have at most {limit:,}")


def check_count(field: str, count: int, limit: int, what: str) -> None:
    """Raise the `ApiError` (400) of `too_many` if `field` has `count` things and may have `limit`.

    what: name of the things, such as "messages".
    """
    if count > limit:
        raise too_many(field, count, limit, what)
