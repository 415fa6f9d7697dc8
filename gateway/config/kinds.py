"""The kinds of settings, as annotations of their fields: what a value is, how it may be written, and its range."""

from __future__ import annotations

import enum
from typing import Annotated, Any, TypeAlias

from msgspec import Meta


class Unit(enum.Enum):
    """What a setting's value is, and so how it may be written."""

    TEXT = "text"
    FLAG = "flag"
    CHOICE = "choice"
    COUNT = "count"
    NUMBER = "number"
    BYTES = "bytes"
    SECONDS = "seconds"
    PATHS = "paths"
    TEXTS = "texts"
    ADDRESSES = "addresses"
    NETWORKS = "networks"
    COUNTS = "counts"
    TENSORS = "tensors"
    TABLE = "table"


def matching(pattern: str, wanted: str, **more: Any) -> Meta:
    """Of a text: the pattern that the whole of it matches, and in words what that allows."""
    # Not Meta's own pattern: it is searched for, and msgspec 0.22 breaks on one beside a list in a union.
    return Meta(extra={"pattern": pattern, "wanted": wanted, **more})


# What ends in OrOff may be 0, which is what its setting says: without a bound, never, none.
Bytes: TypeAlias = Annotated[int, Meta(ge=1, extra={"unit": Unit.BYTES})]
BytesOrOff: TypeAlias = Annotated[int, Meta(ge=0, extra={"unit": Unit.BYTES})]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, extra={"unit": Unit.SECONDS})]
SecondsOrOff: TypeAlias = Annotated[float, Meta(ge=0, extra={"unit": Unit.SECONDS})]
Count: TypeAlias = Annotated[int, Meta(ge=1)]
CountOrOff: TypeAlias = Annotated[int, Meta(ge=0)]
Percent: TypeAlias = Annotated[int, Meta(ge=1, le=100)]
Weight: TypeAlias = Annotated[float, Meta(ge=0, extra={"unit": Unit.NUMBER})]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1, extra={"unit": Unit.NUMBER})]
Port: TypeAlias = Annotated[int, Meta(ge=-1, le=65535)]
Int31: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]

Counts: TypeAlias = Annotated[tuple[Count, ...], Meta(extra={"unit": Unit.COUNTS})]
Paths: TypeAlias = Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(extra={"unit": Unit.PATHS})]
Texts: TypeAlias = Annotated[tuple[str, ...], Meta(extra={"unit": Unit.TEXTS})]
Networks: TypeAlias = Annotated[tuple[str, ...], Meta(extra={"unit": Unit.NETWORKS})]

FileMode: TypeAlias = Annotated[str, matching(r"0?[0-7]{3}", 'three octal digits, such as "660"')]
BearerToken: TypeAlias = Annotated[str, matching(r"([!-~]{16,})?", "16 or more visible ASCII characters, or empty")]
FieldName: TypeAlias = Annotated[str, matching(r"[!#$%&'*+.^_`|~0-9A-Za-z-]*", "the name of a header field, or empty")]
Version: TypeAlias = Annotated[str, matching(r"[A-Za-z0-9._-]{1,64}", "1 to 64 letters, digits, '.', '_' and '-'")]
Factory: TypeAlias = Annotated[
    str,
    matching(
        r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*|[^\W\d]\w*",
        '"module:attribute", or the name of a library model',
    ),
]

_HOST = r"(?!(?:unix|systemd)(?:\+tls)?(?::|$))[^\s/\[\],\"']+"
_PLACES = 'an address or a host name ("0.0.0.0" for every IPv4 address, "::" for IPv6 too), unix:/PATH or systemd:NAME'
Addresses: TypeAlias = Annotated[
    str | tuple[str, ...], matching(rf"{_HOST}|unix:/[^\0]+|systemd(:[!-9;-~]+)?", _PLACES, unit=Unit.ADDRESSES)
]
AddressesWithTLS: TypeAlias = Annotated[
    str | tuple[str, ...],
    matching(rf"{_HOST}|unix(\+tls)?:/[^\0]+|systemd(\+tls)?(:[!-9;-~]+)?", _PLACES, unit=Unit.ADDRESSES),
]

_MODEL = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_MODEL_WANTED = "1 to 128 letters, digits, '.', '_' and '-', beginning with a letter, a digit or '_'"
# EndpointName and VariantName of the SageMaker API.
_SAGEMAKER = r"(?!.{64})[a-zA-Z0-9](-*[a-zA-Z0-9])*"
_SAGEMAKER_WANTED = "1 to 63 letters, digits and '-', neither beginning nor ending with '-'"
# As the keys of a table, names say what they name, with its article, and what stands for one in a text.
ModelName: TypeAlias = Annotated[str, matching(_MODEL, _MODEL_WANTED, of="a model", placeholder="NAME")]
ModelReference: TypeAlias = Annotated[str, matching(_MODEL, "the name of a model")]
EndpointName: TypeAlias = Annotated[str, matching(_SAGEMAKER, _SAGEMAKER_WANTED, of="an endpoint", placeholder="NAME")]
VariantName: TypeAlias = Annotated[str, matching(_SAGEMAKER, _SAGEMAKER_WANTED, of="a variant", placeholder="VARIANT")]
