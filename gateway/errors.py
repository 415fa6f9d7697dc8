"""The errors that end an exchange, each with its status and code. `dialects/answers` has the WebSocket Close codes."""

from __future__ import annotations

import enum
import math
from typing import ClassVar, final

from models.errors import CallLost
from protocols.content_coding import ACCEPTED
from protocols.events import Headers
from protocols.floods import Flood


class Ending(enum.Enum):
    """The one terminal event of an exchange."""

    COMPLETE = "complete"
    MODEL_ERROR = "model-error"
    REFUSED = "refused"
    CANCELLED = "cancelled-by-client"
    DEADLINE = "deadline"
    DRAINED = "drained"
    OPERATOR = "ended-by-operator"
    LOST = "transport-lost"

    __hash__ = object.__hash__  # faster than Enum's, which is a Python function: every ending is counted


class Refusal(enum.Enum):
    """The reasons for which a valid request is not admitted, or is ended for the sake of others."""

    QUEUE = "queue-full"
    """All slots of its model and all places in the queue are taken, or the queue holds too many bytes."""
    QUEUE_TIMEOUT = "queue-timeout"
    """It has waited for a slot for the longest time allowed."""
    PARTY_SHARE = "party-share"
    """Its party already holds its share of the model's slots and queue, or of memory while memory is scarce."""
    IDLE_WHEN_WANTED = "idle-when-wanted"
    """It was silent while others waited for its slot, and was ended."""
    RATE = "rate"
    """Its key has begun too many exchanges per second."""
    CONNECTIONS = "connections"
    """It came on a connection beyond `limits.connections` or `limits.per_peer`."""
    MEMORY = "memory"
    """The byte budget has no room for it, or is above `limits.memory_refuse`."""
    SHED = "memory-reset"
    """It held the most memory while use was above `limits.memory_reset`, or its upload stalled while others needed memory,
    and was ended."""
    DRAINING = "draining"
    """The server is shutting down."""
    NOT_READY = "model-not-ready"
    """Its model is loading, restarting, being unloaded or given up."""
    NO_PLACE = "no-place-for-model"
    """Its model cannot be loaded while all others are in use."""
    NO_TIME = "no-time-left"
    """The deadline in its head has passed."""
    IN_FLIGHT = "in-flight"
    """Its key has the most exchanges at once that it may have."""


class Closing(enum.Enum):
    """The reasons for which the server itself ends a connection."""

    FLOOD = "flood"
    """Its peer sent too much of something that costs the peer little."""
    HEAD_TIMEOUT = "head-timeout"
    """A head, a frame or the start of the connection was not complete in time."""
    IDLE = "idle"
    """It had no request for the longest time allowed."""
    AGED = "aged"
    """It reached its maximum age: the client was told to connect again, and its open exchanges finished."""
    STALLED = "stalled"
    """Its peer read nothing, or stopped in the middle of a frame."""
    EVICTED = "evicted"
    """It had no exchange, and a new connection needed its place."""
    REFUSED = "refused-at-limit"
    """There was no place for it."""


def spread_over(seconds: float, chance: float) -> int:
    """Returns whole seconds after which to try again: at least 1, at least `seconds`, and up to a quarter more, rounded up,
    by `chance` from 0 to 1. So clients that were refused together do not come back together."""
    least = max(1, math.ceil(seconds))
    most = math.ceil(least / 4)
    return least + min(most, int(chance * (most + 1)))


class GatewayError(Exception):
    """Base of the errors that end an exchange.

    `message` is for the client: it names the limit or field, the value and the setting that changes it, and never
    holds user data at length. `status` is used if no head was sent yet. `retryable` is true if the same request may
    succeed later.
    """

    status: int = 500
    retryable: ClassVar[bool] = False
    ending: ClassVar[Ending] = Ending.REFUSED
    code: str = "InternalFailure"
    refusal: Refusal | None = None
    """The reason for which the request was not admitted; None for other errors."""
    headers: Headers = ()
    """Header fields of the answer, in addition to its dialect's."""
    chance: float = 0.0
    """From 0 to 1: how much Retry-After exceeds `retry_after`; see `spread_over`."""
    barred: str = ""
    """The reason, in one word, for which the client may not make this request; empty for other errors."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        retry_after: float | None = 1.0,
        refusal: Refusal | None = None,
    ) -> None:
        """`retry_after`: seconds after which the same request may succeed, if the error is retryable. None: the answer has
        no Retry-After."""
        super().__init__(message)
        if refusal is not None:
            self.refusal = refusal
        self.retry_after = retry_after
        # a lone surrogate, as in an error about a file's name, has no UTF-8: no wire could send it
        self.message = message.encode("utf-8", "replace").decode()
        if status is not None:
            self.status = status

    @property
    def retry(self) -> Headers:
        """The Retry-After field (RFC 9110 section 10.2.3) in whole seconds, if the request may succeed later; else empty."""
        if not self.retryable or self.retry_after is None:
            return ()
        return ((b"retry-after", b"%d" % spread_over(self.retry_after, self.chance)),)


@final
class BadRequest(GatewayError):
    """The client's mistake; nothing reached a model."""

    status = 400
    code = "ValidationError"


@final
class NotFound(GatewayError):
    """No such model or version."""

    status = 404
    code = "NotFound"


@final
class NoSuchPath(GatewayError):
    """The path has no route."""

    status = 404
    code = "NotFound"


@final
class Conflict(GatewayError):
    """The name of a model is taken, or the model is being loaded or unloaded."""

    status = 409
    code = "Conflict"


@final
class MethodNotAllowed(GatewayError):
    """The path exists; `allow` is the value of the Allow header."""

    status = 405
    code = "MethodNotAllowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.headers = ((b"allow", allow.encode()),)


@final
class UpgradeRequired(GatewayError):
    """A path that only a WebSocket can use (RFC 9110 section 15.5.22)."""

    status = 426
    code = "UpgradeRequired"


@final
class TooLarge(GatewayError):
    """A body over its limit."""

    status = 413
    code = "PayloadTooLarge"


@final
class Overloaded(GatewayError):
    """No slot, no queue place or no bytes left; try again later."""

    status = 503
    retryable = True
    code = "ServiceUnavailable"


@final
class OthersWait(GatewayError):
    """The session was silent for too long while others waited for its slot."""

    status = 503
    refusal = Refusal.IDLE_WHEN_WANTED
    retryable = True
    code = "OthersWait"


@final
class Unavailable(GatewayError):
    """The model is loading, restarting or given up, or the server is draining: nothing was started."""

    status = 503
    refusal = Refusal.NOT_READY
    retryable = True
    code = "ServiceUnavailable"


@final
class ModelNotReady(GatewayError):
    """The model that an endpoint names is being loaded: nothing was started."""

    status = 503
    refusal = Refusal.NOT_READY
    retryable = True
    code = "ModelNotReadyException"


@final
class InsufficientStorage(GatewayError):
    """A model does not fit beside the loaded ones. It may fit once another is unloaded."""

    status = 507
    retryable = True
    code = "InsufficientStorage"


@final
class BadModel(GatewayError):
    """A model's folder has a mistake, or holds no model. The text names the file and the key."""

    status = 400
    code = "BadModel"


@final
class LoadFailed(GatewayError):
    """A model's own code raised while it was loaded. The text names the file and the exception."""

    status = 500
    ending = Ending.MODEL_ERROR
    code = "LoadFailed"


class Drained(GatewayError):
    """The server is shutting down and the drain deadline has passed."""

    status = 503
    retryable = True
    ending = Ending.DRAINED
    code = "ServiceUnavailable"


@final
class EndedByOperator(Drained):
    """An operator has ended this one stream. Clients get the same answer as in a drain."""

    ending = Ending.OPERATOR


@final
class SlowReader(GatewayError):
    """The client has read nothing of its answer for too long. It gets this error if it reads again."""

    status = 408
    ending = Ending.LOST
    code = "SlowReader"

    def __init__(self, seconds: float) -> None:
        """`seconds` is what `limits.write_stall` allows."""
        super().__init__(f"the client took nothing of its answer for {seconds:g} s (limits.write_stall)")


@final
class DeadlineExceeded(GatewayError):
    """The session's time is over."""

    status = 504
    ending = Ending.DEADLINE
    code = "ModelInvocationTimeExceeded"


@final
class WorkerLost(GatewayError, CallLost):
    """The model's worker ended under the session: not this session's fault."""

    status = 503
    retryable = True
    ending = Ending.MODEL_ERROR
    code = "WorkerLost"


@final
class ModelFailed(GatewayError):
    """The model raised ModelError. The client gets its text, code and status."""

    ending = Ending.MODEL_ERROR

    def __init__(self, message: str, *, code: str, status: int) -> None:
        super().__init__(message, status=status)
        self.code = code

    @property
    def too_long(self) -> bool:
        """True if the prompt does not fit into the model's context (`models.errors.ContextLengthExceeded`)."""
        return self.code == "ContextLengthExceeded"

    @property
    def request_to_blame(self) -> bool:
        """True if the model says that the request itself is at fault, not the model."""
        return self.too_long or self.code == "ValidationError"


@final
class ModelCrashed(GatewayError):
    """The model raised another exception. The client gets an id, under which the log has the traceback."""

    status = 500
    ending = Ending.MODEL_ERROR
    code = "ModelError"


@final
class ModelStalled(GatewayError):
    """The model could send, and has sent nothing for longer than its `stall_timeout`."""

    status = 504
    ending = Ending.MODEL_ERROR
    code = "ModelStalled"


@final
class InternalFailure(GatewayError):
    """The gateway has a bug. The client gets an id, under which the log has the traceback."""

    status = 500
    ending = Ending.MODEL_ERROR
    code = "InternalFailure"


@final
class Forbidden(GatewayError):
    """A signature that is missing or wrong. `code` is the name that AWS gives the error."""

    status = 403

    def __init__(self, message: str, *, code: str, status: int = 403) -> None:
        super().__init__(message, status=status)
        self.code = code


@final
class Unauthenticated(GatewayError):
    """No key, or a wrong one (RFC 6750 section 3). `missing`: no key. A wrong key is unknown, expired or removed."""

    status = 401
    code = "Unauthorized"
    headers = ((b"www-authenticate", b'Bearer realm="everywire"'),)
    grpc_status: ClassVar[int] = 16
    """UNAUTHENTICATED, in gRPC's words."""

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


@final
class NotPermitted(GatewayError):
    """The client may not make this request: its key has no right to it, or no browser page may. `model` is the name of a
    model that the key does not reach, existing or not."""

    status = 403
    code = "Forbidden"
    grpc_status: ClassVar[int] = 7
    """PERMISSION_DENIED."""

    def __init__(self, message: str, *, model: str | None = None) -> None:
        super().__init__(message)
        self.model = model

    @classmethod
    def of_model(cls, model: str) -> NotPermitted:
        """Makes the error for a model that a key does not reach."""
        error = cls(f"this key does not reach model {model[:100]!r}", model=model)
        error.barred = "model"
        return error


@final
class TooManyRequests(GatewayError):
    """The key has the most exchanges allowed, at once or per second."""

    status = 429
    retryable = True
    code = "TooManyRequests"
    grpc_status: ClassVar[int] = 8
    """RESOURCE_EXHAUSTED."""


@final
class WrongHost(GatewayError):
    """The request's host is not a name of this server (RFC 9110 section 15.5.20)."""

    status = 421
    code = "MisdirectedRequest"


@final
class UnsupportedType(GatewayError):
    """A content type that a browser page can send without asking first (CORS), on a route that does not allow it."""

    status = 415
    code = "UnsupportedMediaType"


@final
class ModelOutOfMemory(GatewayError):
    """The model ran out of memory. With other models unloaded the same request may succeed."""

    status = 507
    retryable = True
    ending = Ending.MODEL_ERROR
    code = "InsufficientStorage"


@final
class UnsupportedEncoding(GatewayError):
    """A Content-Encoding that is unknown, or that this route does not take. `accepted` has those that it takes."""

    status = 415
    code = "UnsupportedMediaType"

    def __init__(self, message: str, *, accepted: bytes = ACCEPTED) -> None:
        super().__init__(message)
        self.headers = ((b"accept-encoding", accepted),)


@final
class SlowUpload(GatewayError):
    """The upload of a unary request stopped arriving."""

    status = 408
    code = "RequestTimeout"


@final
class ModelGivenUp(Exception):
    """Raised by `serve` after its drain, if a model with the restart policy `escalate` was given up."""


class TransportLost(Exception):
    """The connection is gone. No client sees this error: there is none left to send it to.

    `left` is true if the peer ended the connection (a FIN, an RST, a broken pipe); otherwise it failed.
    """

    def __init__(self, reason: str = "", *, left: bool = False) -> None:
        super().__init__(reason)
        self.left = left


class TransportFlooded(TransportLost):
    """The peer sent too much of what the transport itself reads: the connection is ended, as after a flood of frames."""

    def __init__(self, flood: Flood, what: str) -> None:
        super().__init__(f"too many {what}: {flood.count}")
        self.flood = flood
