"""The error catalogue: every failure a user can meet has a code, a cause and a cure.

An error crosses every room unchanged: a model file raises it, the CLI prints it, the server turns `status` into an
HTTP status and each dialect wraps it in its own shape. Nothing here knows HTTP, files or models.
"""

from __future__ import annotations


class QuireError(Exception):
    """Something a user can act on. `code` is stable, `message` says what is wrong and where, `cure` what to do."""

    code = "internal_error"
    status = 500

    def __init__(self, message: str, *, cure: str = "", param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = _sendable(message)
        self.cure = _sendable(cure)
        self.param = param  # the request field at fault, if one is
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        return f"{self.message} ({self.cure})" if self.cure else self.message


def _sendable(text: str) -> str:
    """The text as a terminal and a socket take it: what a file or a request put into it may be no Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


class BadRequest(QuireError):
    """The request cannot be honoured as it stands."""

    code = "invalid_request"
    status = 400


class TooLarge(QuireError):
    """The request's body is over the configured bound."""

    code = "request_too_large"
    status = 413


class NotFound(QuireError):
    """No such model, route or object."""

    code = "not_found"
    status = 404


class Busy(QuireError):
    """The server has too much work: its queue is full, or a promise could not be kept. `retry_after` is in seconds."""

    code = "queue_full"
    status = 429

    def __init__(self, message: str, *, retry_after: float = 1.0, cure: str = "", code: str | None = None):
        super().__init__(message, cure=cure, code=code)
        self.retry_after = retry_after


class Unavailable(QuireError):
    """The server is starting, draining or restarting its engine. `retry_after` is in seconds; None: nobody can say, or never."""

    code = "unavailable"
    status = 503

    def __init__(self, message: str, *, retry_after: float | None = None, cure: str = ""):
        super().__init__(message, cure=cure)
        self.retry_after = retry_after


class EngineDead(QuireError):
    """The engine process died while it held the request."""

    code = "engine_dead"
    status = 503


class BadModelFile(QuireError):
    """A model file is broken, hostile or uses something this version does not support."""

    code = "bad_model_file"
    status = 500


class Unsupported(QuireError):
    """A model, format or pre-tokenizer that is known to exist but is not supported here."""

    code = "unsupported"
    status = 400


class NotEnoughMemory(QuireError):
    """More memory was asked for than there is. The message has the numbers."""

    code = "not_enough_memory"
    status = 503


class DownloadFailed(QuireError):
    """A model could not be fetched or did not verify."""

    code = "download_failed"
    status = 502
