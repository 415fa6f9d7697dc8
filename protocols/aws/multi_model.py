"""SageMaker's multi-model container API: bodies to load, list, get and unload models, pages of the list, and errors."""

from __future__ import annotations

import base64
import binascii
import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, final

import msgspec

from protocols.events import Buffer
from protocols.json import strict

CONTENT_TYPE: Final = b"application/json"
"""The content type of every body here."""

MAX_NAME: Final = 1024
"""The most bytes of a model's name. The platform's names are hashes; a person who calls a container uses the target model,
which has at most 1024 characters."""
MAX_URL: Final = 4096
"""The most bytes of a model's url, which is a path: PATH_MAX of Linux."""
MAX_PAGE: Final = 100
"""The most models of one page, and the default."""


# ---- errors


class MultiModelErrorType(enum.StrEnum):
    """The errors, by the names of AWS's multi-model server. That server calls 507 InternalServerException, as it does 500;
    here it has the name of the status."""

    BAD_REQUEST = "BadRequestException"
    NOT_FOUND = "ResourceNotFoundException"
    MODEL_NOT_FOUND = "ModelNotFoundException"
    METHOD_NOT_ALLOWED = "MethodNotAllowedException"
    CONFLICT = "ConflictStatusException"
    INTERNAL = "InternalServerException"
    UNAVAILABLE = "ServiceUnavailableException"
    INSUFFICIENT_STORAGE = "InsufficientStorageException"

    @property
    def status(self) -> int:
        return _STATUS[self]


_STATUS = {
    MultiModelErrorType.BAD_REQUEST: 400,
    MultiModelErrorType.NOT_FOUND: 404,
    MultiModelErrorType.MODEL_NOT_FOUND: 404,
    MultiModelErrorType.METHOD_NOT_ALLOWED: 405,
    MultiModelErrorType.CONFLICT: 409,
    MultiModelErrorType.INTERNAL: 500,
    MultiModelErrorType.UNAVAILABLE: 503,
    MultiModelErrorType.INSUFFICIENT_STORAGE: 507,
}


@final
class MMEError(Exception):
    """A request that is invalid in this API. `message` names the member and is fit for the peer."""

    errortype: Final = MultiModelErrorType.BAD_REQUEST
    status: Final = 400

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class _ErrorBody(msgspec.Struct):
    code: int
    type: str
    message: str


def error_body(errortype: MultiModelErrorType, message: str) -> bytes:
    """The body of an answer with `errortype.status`. A lone surrogate in `message` becomes `?`."""
    return _encode(_ErrorBody(errortype.status, errortype.value, _clean(message)))


_TYPES = {kind.status: kind for kind in MultiModelErrorType}  # for 404, the one for models


def error_body_of(status: int, message: str) -> bytes:
    """The body for any error status. A status without a name here is a bad request below 500, and an internal error
    above."""
    errortype = _TYPES.get(status, MultiModelErrorType.BAD_REQUEST if status < 500 else MultiModelErrorType.INTERNAL)
    return _encode(_ErrorBody(status, errortype.value, _clean(message)))


def _encode(body: msgspec.Struct) -> bytes:
    return msgspec.json.encode(body)


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


# ---- load


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelToLoad:
    """A request to load the model at `url` and keep it as `name`. The caller decides whether the url may be read."""

    name: str
    url: str


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def parse_load(body: Buffer) -> ModelToLoad:
    """The body of POST /models: a JSON object with the strings `model_name` and `url`. Other members are ignored.

    MMEError if the body is not strict JSON (the contract's own example has a comma before the closing brace, which is
    refused); if a member is duplicate, missing or not a string; and if a value is empty, too long or has control characters.
    A name is later one segment of a path, so it must not contain a slash or be a dot segment. AWS's server accepts query
    parameters instead of a body; they are not in the contract, and are ignored.
    """
    try:
        members = strict.loads(body, depth=8, what="the body of POST /models", duplicates=False)
    except strict.JSONError as error:
        raise MMEError(f"{error.message}; a JSON object with model_name and url is needed") from None
    if type(members) is not dict:
        raise MMEError("the body of POST /models must be a JSON object with model_name and url")
    name = _string(members, "model_name", MAX_NAME)
    if "/" in name or name in (".", ".."):
        raise MMEError(f"model_name is one segment of a path, without a slash and not . or .., got {name[:64]!r}")
    return ModelToLoad(name=name, url=_string(members, "url", MAX_URL))


def _string(members: dict[str, object], member: str, longest: int) -> str:
    value = members.get(member)
    if type(value) is not str or not value:
        came = "it is missing" if value is None else "it is empty" if value == "" else f"got {_kind(value)}"
        raise MMEError(f"{member} must be a string, {came}")
    if (size := len(value.encode())) > longest:
        raise MMEError(f"{member} has at most {longest} bytes of UTF-8, got {size}")
    if found := _CONTROL.search(value):
        raise MMEError(f"{member} must not have control characters, got U+{ord(found[0]):04X} at position {found.start()}")
    return value


def _kind(value: object) -> str:
    match value:
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case list():
            return "an array"
        case _:
            return "an object"


# ---- answers


class _Status(msgspec.Struct):
    status: str


class _Model(msgspec.Struct, rename="camel"):
    model_name: str
    model_url: str


class _Page(msgspec.Struct, rename="camel", omit_defaults=True):
    models: list[_Model]
    next_page_token: str = ""


def loaded_body(name: str) -> bytes:
    """The body of the 200 to a load: the model now answers. The contract requires no body; this one follows other
    servers."""
    return _encode(_Status(f'Model "{name}" registered'))


def unloaded_body(name: str) -> bytes:
    """The body of the 200 to an unload: the model's resources are free."""
    return _encode(_Status(f'Model "{name}" unregistered'))


def model_body(name: str, url: str) -> bytes:
    """The body of the 200 to GET /models/{name}: one object."""
    return _encode(_Model(name, url))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """The models that a page of the list has: at most `limit`, whose names sort behind `after`."""

    limit: int = MAX_PAGE
    after: str = ""


def parse_page(limit: str | None = None, token: str | None = None) -> PageRequest:
    """The query parameters `limit` and `next_page_token`, percent-decoded. An invalid one is ignored: a limit that is not a
    number from 1 to 100, and a token that we did not make (such as the offsets of AWS's server)."""
    return PageRequest(limit=_limit(limit or ""), after=_after(token or ""))


def _limit(text: str) -> int:
    wanted = int(text) if text.isascii() and text.isdecimal() and len(text) <= 20 else 0
    return wanted if 1 <= wanted <= MAX_PAGE else MAX_PAGE


# A token holds the last name of its page. An offset would skip or repeat models if others come and go between two pages.
# The mark tells tokens from other texts that happen to be base64.
_MARK = b"after:"


def _token(name: str) -> str:
    return base64.urlsafe_b64encode(_MARK + name.encode()).rstrip(b"=").decode()


def _after(token: str) -> str:
    try:
        name = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):  # UnicodeDecodeError too, and characters beyond ASCII
        return ""
    return name.removeprefix(_MARK.decode()) if name.startswith(_MARK.decode()) else ""


def page_body(models: Iterable[tuple[str, str]], page: PageRequest) -> bytes:
    """The body of the 200 to GET /models: the page of these models, given as (name, url) in any order and sorted by name. It
    has a nextPageToken only if a model follows, so the last page is never empty."""
    rest = sorted(model for model in models if model[0] > page.after)
    shown = [_Model(name, url) for name, url in rest[: page.limit]]
    return _encode(_Page(shown, _token(shown[-1].model_name) if len(rest) > page.limit else ""))
