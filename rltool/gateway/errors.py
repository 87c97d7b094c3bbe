"""What the gateway refuses, in any API; each translator formats it as its API's error."""

from __future__ import annotations

from rltool.errors import RltoolError


class RequestError(RltoolError):
    """A request that is not served. status: of HTTP; code: a word for programs; field: what is wrong, if it is one."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code or self.code


class BadRequest(RequestError):
    status, code = 400, "invalid_request"


class Unauthorized(RequestError):
    status, code = 401, "invalid_api_key"


class NotFound(RequestError):
    status, code = 404, "not_found"


class TooLarge(RequestError):
    status, code = 413, "request_too_large"


class TooMany(RequestError):
    """A limit that other requests fill; later it may be free."""

    status, code = 429, "rate_limit_exceeded"


class EnginesFailed(RequestError):
    """No engine has answered; another try may help."""

    status, code = 503, "engines_failed"


class NotRecorded(RequestError):
    """The turn could not be written down, so it is not given to the agent."""

    status, code = 500, "not_recorded"
