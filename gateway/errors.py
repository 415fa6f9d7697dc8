"""The errors of an exchange, with their statuses and texts; `dialects/answers` has a WebSocket's Close code for each."""

from __future__ import annotations

import enum
import math
from typing import ClassVar, final

from models.errors import CallLost
from protocols.content_coding import ACCEPTED
from protocols.events import Headers


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

    __hash__ = object.__hash__  # Enum's own is a call of Python's, and endings are counted


class Refusal(enum.Enum):
    """Why a request was not admitted, though nothing is wrong with it."""

    QUEUE = "queue-full"
    """All slots of its model and all places in its queue are taken, or the queue holds too many bytes."""
    QUEUE_TIMEOUT = "queue-timeout"
    """It has waited for a slot as long as one may."""
    PARTY_SHARE = "party-share"
    """Its party holds its share of the model's slots and of the places in its queue, or of memory while that is scarce."""
    IDLE_WHEN_WANTED = "idle-when-wanted"
    """It was ended because it was silent while others waited for its slot."""
    RATE = "rate"
    """Its key may not begin so many exchanges."""
    CONNECTIONS = "connections"
    """It came on a connection beyond `limits.connections` or `limits.per_peer`."""
    MEMORY = "memory"
    """The byte budget has no room for it, or is above `limits.memory_refuse`."""
    SHED = "memory-reset"
    """It was ended because it held most, above `limits.memory_reset`."""
    DRAINING = "draining"
    """The server is shutting down."""
    NOT_READY = "model-not-ready"
    """Its model is loading, restarting, being unloaded or given up."""
    NO_PLACE = "no-place-for-model"
    """Its model cannot be loaded while all others are in use."""
    NO_TIME = "no-time-left"
    """Its head says that its time is over."""
    IN_FLIGHT = "in-flight"
    """Its key has as many exchanges at once as it may."""


class Closing(enum.Enum):
    """Why the server has ended a connection by itself."""

    FLOOD = "flood"
    """Its peer did too much of what costs it little."""
    HEAD_TIMEOUT = "head-timeout"
    """A head, a frame, or the bytes that a connection begins with were not complete in time."""
    IDLE = "idle"
    """Nothing was asked for longer than it may be."""
    AGED = "aged"
    """It was as old as it may be: its client was sent elsewhere, and what was open has gone on."""
    STALLED = "stalled"
    """Its peer took nothing, or stopped in the middle of a frame."""
    EVICTED = "evicted"
    """It had no exchange, and its place was another's."""
    REFUSED = "refused-at-limit"
    """There was no place for it."""


def spread_over(seconds: float, chance: float) -> int:
    """The whole seconds, at least 1, after which to try again: never less than these, and up to a quarter more, rounded up,
    by `chance` from 0 to 1. Clients that were refused together do not come back together."""
    least = max(1, math.ceil(seconds))
    most = math.ceil(least / 4)
    return least + min(most, int(chance * (most + 1)))


class GatewayError(Exception):
    """Base of the errors that end an exchange.

    `message` is public: it names the limit or field, the value and the setting that changes it, and never holds
    user data at length. `status` is used where no head was sent yet; `retryable` says whether the same request may
    succeed later.
    """

    status: int = 500
    retryable: ClassVar[bool] = False
    ending: ClassVar[Ending] = Ending.REFUSED
    code: str = "InternalFailure"
    refusal: Refusal | None = None
    """Why the request was not admitted, where that is what this says."""
    headers: Headers = ()
    """Fields that the head of the answer has beside its dialect's own."""
    chance: float = 0.0
    """From 0 to 1: how much later than `retry_after` its answer says; see `spread_over`."""
    barred: str = ""
    """Why who asks may not ask for this, in a word, where that is what this says."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        retry_after: float | None = 1.0,
        refusal: Refusal | None = None,
    ) -> None:
        """`retry_after`: in how many seconds the same request may succeed, where the error is retryable; None where
        nobody knows that it ever will."""
        super().__init__(message)
        if refusal is not None:
            self.refusal = refusal
        self.retry_after = retry_after
        # a lone surrogate, as in what is raised about a file's name, has no UTF-8: no wire could say it
        self.message = message.encode("utf-8", "replace").decode()
        if status is not None:
            self.status = status

    @property
    def retry(self) -> Headers:
        """Retry-After (RFC 9110 section 10.2.3), in whole seconds, for an answer whose request may succeed later."""
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
    """Nothing is answered at this path."""

    status = 404
    code = "NotFound"


@final
class Conflict(GatewayError):
    """The name of a model is taken, or the model is on its way in or out."""

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
    """The session was silent for as long as one may be for whose slot others wait."""

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
    """A model does not fit beside those that are loaded: it may, once another is unloaded."""

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
    """An operator has ended this stream alone; every dialect says it as it says a drain."""

    ending = Ending.OPERATOR


@final
class SlowReader(GatewayError):
    """The client has taken none of what is there for it for too long. It hears of it where it reads again."""

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
    """The model raised ModelError: its text, code and status are the client's to see."""

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
        """True if the model says that the request cannot be served, and that nothing else is wrong."""
        return self.too_long or self.code == "ValidationError"


@final
class ModelCrashed(GatewayError):
    """The model raised something else: the client sees an id that the log explains."""

    status = 500
    ending = Ending.MODEL_ERROR
    code = "ModelError"


@final
class InternalFailure(GatewayError):
    """A bug of ours: the client sees an id that the log explains."""

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
    """No key, or a wrong one (RFC 6750 section 3). `missing` says which; unknown, expired and removed ones are all wrong."""

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
    """The client may not ask for this: another key may, or no page of this origin may. `model` is the name of a model that
    the key does not reach, whether or not it exists."""

    status = 403
    code = "Forbidden"
    grpc_status: ClassVar[int] = 7
    """PERMISSION_DENIED."""

    def __init__(self, message: str, *, model: str | None = None) -> None:
        super().__init__(message)
        self.model = model

    @classmethod
    def of_model(cls, model: str) -> NotPermitted:
        """The error for a model that a key does not reach."""
        error = cls(f"this key does not reach model {model[:100]!r}", model=model)
        error.barred = "model"
        return error


@final
class TooManyRequests(GatewayError):
    """The key has as many exchanges as it may, at once or in this time."""

    status = 429
    retryable = True
    code = "TooManyRequests"
    grpc_status: ClassVar[int] = 8
    """RESOURCE_EXHAUSTED."""


@final
class WrongHost(GatewayError):
    """The server is not called that (RFC 9110 section 15.5.20)."""

    status = 421
    code = "MisdirectedRequest"


@final
class UnsupportedType(GatewayError):
    """A content type that a page of a browser may send unasked, where it may not."""

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
    """A Content-Encoding that is not known, or none that this route takes; `accepted` are those that it does."""

    status = 415
    code = "UnsupportedMediaType"

    def __init__(self, message: str, *, accepted: bytes = ACCEPTED) -> None:
        super().__init__(message)
        self.headers = ((b"accept-encoding", accepted),)


@final
class SlowUpload(GatewayError):
    """A unary upload that stopped arriving."""

    status = 408
    code = "RequestTimeout"


@final
class ModelGivenUp(Exception):
    """Raised by `serve`, after its drain, when a model was given up whose policy is `escalate`."""


class TransportLost(Exception):
    """The connection under us is gone. Never shown to anyone: there is nobody to show it to.

    `left` says that the peer ended it (a FIN, an RST, a broken pipe), which is leaving; otherwise it failed.
    """

    def __init__(self, reason: str = "", *, left: bool = False) -> None:
        super().__init__(reason)
        self.left = left
