"""Reads single members of a document of OpenAI's API. Errors name the member, what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from protocols.lmi.parameters import shown
from protocols.openai.errors import OpenAIError

T = TypeVar("T")


def get(document: Mapping[str, Any], name: str, read: Callable[[str, object], T], default: T, path: str = "") -> T:
    """The member, read; the default if it is absent or null. `path` leads to the document."""
    value = document.get(name)
    return default if value is None else read(f"{path}.{name}" if path else name, value)


def error(param: str, message: str) -> OpenAIError:
    """The error of status 400 that blames a member."""
    return OpenAIError(message, param=param)


def refuse_value(name: str, expected: str, value: object) -> NoReturn:
    """Raises the error for a value that is not what was expected."""
    raise error(name, f"{name}: expected {expected}, got {shown(value)}")


def boolean(name: str, value: object) -> bool:
    """True or false."""
    return value if isinstance(value, bool) else refuse_value(name, "true or false", value)


def string(name: str, value: object) -> str:
    """A string."""
    return value if isinstance(value, str) else refuse_value(name, "a string", value)


def object_of(name: str, value: object) -> dict[str, Any]:
    """An object."""
    return value if isinstance(value, dict) else refuse_value(name, "an object", value)
