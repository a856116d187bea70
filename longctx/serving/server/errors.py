"""Errors in OpenAI's form, `{"error": {"message", "type", "param", "code"}}`, and their statuses."""

import contextlib
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from longctx.serving.engine.admission_control import Refused

_ARGUMENT = re.compile(
    r"(?:prompts\[\d+\]: )?([a-z][a-z_]*)(?:'s token| of token \d+)? (?:must|contradicts?|has|needs?)\b"
    r"|([a-z][a-z_]*)(?:\.[a-z_]+)?: "  # of a field that says which form a text has
)
_NAME = re.compile(r"(?!(?:str|int|constrained-\w+)$)\w+")  # of a field, not of a type
# Names of the engine's own arguments that clients call otherwise.
_PARAMS = {"tpot_target": "tpot_ms", "ttft_deadline": "ttft_ms", "session_id": "prompt_cache_key"}
_SHOWN_PROBLEMS = 3
_LONGEST_MESSAGE, _LONGEST_PARAM = 2000, 100  # characters: what clients send may be in it
DROPPED = "x-llm-d-request-dropped-reason"
"""Header with the reason why a request was refused that could be served at another time."""
IGNORED = "x-longctx-ignored-fields"
"""Header of an answer with the names of fields that no server is known to have."""

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Answer that is an error: an HTTP status, a sentence for people, and a code for programs.

    It has a bounded length, whatever it repeats of what a client sent.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.message = message if len(message) <= _LONGEST_MESSAGE else f"{message[: _LONGEST_MESSAGE - 4]} ..."
        self.param = None if param is None else param[:_LONGEST_PARAM]
        self.headers = dict(headers or {})
        if retry_after is not None:
            # Clients of OpenAI honour the milliseconds, others whole seconds.
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after)))
            self.headers["retry-after-ms"] = str(max(1, math.ceil(retry_after * 1000)))

    def __reduce__(self) -> tuple[Any, ...]:  # it may come from another process
        make = functools.partial(ApiError, headers=self.headers)
        return make, (self.status, self.message, self.param, self.code)

    @property
    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in the form of `/v1/messages`."""
    kind = _ANTHROPIC.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_response(path: str, error: ApiError) -> Response:
    """Return the answer to a request for a path, in the form of its API."""
    body = anthropic_error(error) if path.startswith("/v1/messages") else error.body
    return Response(msgspec.json.encode(body), error.status, error.headers, "application/json")


def no_such_model(name: str) -> ApiError:
    """Return the answer to a request for another model."""
    return ApiError(404, f"the model {name[:80]!r} does not exist", "model", "model_not_found")


def not_valid(error: ValidationError) -> ApiError:
    """Return the answer to a body that is no JSON, or has wrong fields or types."""
    # Of a value that may be of several types, the problem of the one that it comes nearest to.
    nearest: dict[str | None, tuple[int, str]] = {}
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        path = problem["loc"]
        field = str(path[0]) if path else None
        if field not in nearest or len(path) > nearest[field][0]:
            place = ".".join(str(part)[:80] for part in path if isinstance(part, int) or _NAME.fullmatch(part))
            text = problem["msg"].removeprefix("Value error, ")
            nearest[field] = len(path), f"{place}: {text}" if place else text
    texts = [text for _, text in nearest.values()]
    more = [f"and {len(texts) - _SHOWN_PROBLEMS} more"] if len(texts) > _SHOWN_PROBLEMS else []
    return ApiError(400, "; ".join([*texts[:_SHOWN_PROBLEMS], *more]), next(iter(nearest)))


def not_servable(error: Exception) -> ApiError:
    """Return the answer to a request that the types of the engine refuse: their errors name the argument first."""
    text = str(error)
    found = _ARGUMENT.match(text)
    name = None if found is None else found[1] or found[2]
    param = None if name is None else _PARAMS.get(name, name)
    code = "context_length_exceeded" if "longest sequence" in text else None
    return ApiError(400, text, param, code)


@contextlib.contextmanager
def refusals_answered() -> Iterator[None]:
    """Raise ApiError for the errors of `EngineThread.submit`."""
    try:
        yield
    except Refused as error:
        dropped: dict[str, str] = {DROPPED: error.reason}
        if error.reason == "draining":
            dropped["connection"] = "close"
            answer = ApiError(503, str(error), None, "server_is_overloaded", error.retry_after, dropped)
        else:
            answer = ApiError(429, str(error), None, "slow_down", error.retry_after, dropped)
        raise answer from error
    except (TypeError, ValueError) as error:
        raise not_servable(error) from error
    except RuntimeError as error:
        raise ApiError(500, str(error), code="engine_error") from error
