"""Derives the tensors that a function of arrays takes and returns from its annotations."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, NotRequired, Required, Union

import numpy as np

from models.messages import InferResponse, datatype_of
from models.spec import Shape, TensorSpec

# Annotations for "some number": numpy has no dtype for them.
_ABSTRACT = (
    np.generic, np.number, np.integer, np.signedinteger, np.unsignedinteger,
    np.inexact, np.floating, np.complexfloating, np.flexible, np.character,
)  # fmt: skip

# The types that a function of arrays may return, beside those with named members.
_ANSWERS = (np.ndarray, int, float, Mapping, InferResponse)


def input_specs(owner: str, parameters: Iterable[inspect.Parameter], hints: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """The inputs of a function of arrays, in the order of its parameters: those without a default, and as optional ones
    those with a default and an array as annotation. Properties that an annotation leaves open are undeclared. TypeError,
    which names `owner`, for an array that v2 cannot carry, and for an input annotated with another type."""
    found = []
    for parameter in parameters:
        name, hint, optional = parameter.name, hints.get(parameter.name), parameter.default is not parameter.empty
        if not optional and (other := _other_class(hint)):
            raise TypeError(
                f"{owner}: {name!r} is annotated as {other.__name__}, and each input is a numpy array: annotate it as one, "
                "or give it a default if it is no input"
            )
        if not optional or _is_array(hint):
            found.append(_spec(owner, name, hint, optional=optional))
    return tuple(found)


def text_inputs(names: Iterable[str], hints: Mapping[str, Any]) -> dict[str, np.dtype[Any]]:
    """The dtype of each input whose annotation is an array of text: numpy's str_, or a StringDType."""
    found = {}
    for name in names:
        array = unaliased(hints.get(name))
        dtype = _dtype_of(typing.get_args(array)[1:]) if _is_array(array) else None
        if dtype is not None and dtype.kind in "UT":
            found[name] = dtype
    return found


def output_specs(owner: str, hint: Any) -> tuple[TensorSpec, ...] | None:
    """The outputs that a return annotation declares: an array is OUTPUT0, a number is OUTPUT0 without dimensions, and a
    TypedDict or a NamedTuple has its own names. None if the annotation does not tell, or if an output may be missing.
    TypeError as for `input_specs`, and for a type that is not an answer."""
    if _is_array(hint):
        return (_spec(owner, "OUTPUT0", hint),)
    hint = unaliased(hint)
    other = _other_class(hint)
    if other and issubclass(other, np.generic):
        dtype = np.dtype[other]  # type: ignore[valid-type]  # as an annotation has it
        return (_spec(owner, "OUTPUT0", Annotated[np.ndarray[Any, dtype], Shape()]),)
    if not typing.is_typeddict(hint) and not is_named_tuple(hint):
        if other and not issubclass(other, _ANSWERS):
            raise TypeError(
                f"{owner} returns {other.__name__}: a model of tensors answers with an InferResponse, an array, a number, "
                "or a dict, TypedDict or NamedTuple of arrays; to answer more than once, write a generator"
            )
        return None
    members = hints_of(hint)
    # __optional_keys__ misses a NotRequired in annotations that are strings
    if getattr(hint, "__optional_keys__", ()) or any(typing.get_origin(m) is NotRequired for m in members.values()):
        return None
    names = hint._fields if is_named_tuple(hint) else members  # collections.namedtuple has no annotations
    return tuple([_spec(owner, name, members.get(name)) for name in names])


def is_named_tuple(kind: Any) -> bool:
    """True for a class made by typing.NamedTuple or collections.namedtuple."""
    return inspect.isclass(kind) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def hints_of(thing: Any) -> dict[str, Any]:
    """The annotations of a function or a class. TypeError if one cannot be resolved."""
    try:
        return typing.get_type_hints(thing, include_extras=True)
    except (NameError, AttributeError) as e:
        raise TypeError(
            f"{thing.__qualname__}: an annotation cannot be resolved: {e}; import it at run time, not under TYPE_CHECKING"
        ) from e


def unaliased(hint: Any) -> Any:
    """The type behind an annotation: without Annotated, `| None`, and the aliases of `type` statements, such as numpy's
    NDArray."""
    return _taken_apart(hint)[0]


def _taken_apart(hint: Any) -> tuple[Any, Shape | None]:
    shape = None
    while True:
        kind, arguments = typing.get_origin(hint), typing.get_args(hint)
        if kind in (Annotated, Required):
            shape = next((extra for extra in arguments[1:] if isinstance(extra, Shape)), shape)
            hint = arguments[0]
        elif kind in (Union, UnionType):
            some = [one for one in arguments if one is not NoneType]
            if len(some) != 1:
                return np.ndarray if all(map(_is_array, some)) else hint, shape
            hint = some[0]
        elif (alias := getattr(kind or hint, "__value__", None)) is not None:
            bound = dict(zip((kind or hint).__type_params__, arguments, strict=False))
            open_ = getattr(alias, "__parameters__", ())
            hint = alias[tuple([bound.get(one, Any) for one in open_])] if open_ else alias
        else:
            return hint, shape


def _other_class(hint: Any) -> Any:
    """The class in an annotation, if it is not an array's; None if it may be an array."""
    hint = unaliased(hint)
    kind = typing.get_origin(hint) or hint
    if (
        not inspect.isclass(kind)
        or kind in (np.ndarray, object, Any, NoneType, UnionType)
        or getattr(kind, "_is_protocol", False)
    ):
        return None
    return kind


def _is_array(hint: Any) -> bool:
    hint = unaliased(hint)
    return (typing.get_origin(hint) or hint) is np.ndarray


def _spec(owner: str, name: str, hint: Any, *, optional: bool = False) -> TensorSpec:
    array, shape = _taken_apart(hint)
    axes, *rest = typing.get_args(array) or (None,) if _is_array(array) else (None,)
    try:
        return TensorSpec(
            name=name,
            datatype="" if (dtype := _dtype_of(rest)) is None else datatype_of(dtype),
            shape=_open_shape(axes) if shape is None else tuple(shape),
            optional=optional,
        )
    except (TypeError, ValueError) as e:
        raise TypeError(f"{owner}: the annotation of {name!r}: {e}") from None


def _open_shape(axes: Any) -> tuple[int, ...] | None:
    """The shape in numpy's own annotation, which has at most the number of dimensions."""
    sizes = typing.get_args(axes)
    return (-1,) * len(sizes) if typing.get_origin(axes) is tuple and Ellipsis not in sizes else None


def _dtype_of(said: Iterable[Any]) -> np.dtype[Any] | None:
    """The dtype in an array's annotation, which says it as `np.dtype[scalar]`, as a class of dtypes such as
    `np.dtypes.StringDType`, or as a dtype. None if that is open."""
    for dtype in said:
        scalar: Any = next(iter(typing.get_args(dtype)), dtype)
        if isinstance(scalar, np.dtype):
            return scalar
        if not inspect.isclass(scalar):
            return None
        if scalar is str or (issubclass(scalar, np.generic) and scalar not in _ABSTRACT):
            return np.dtype(scalar)
        if issubclass(scalar, np.dtype) and scalar is not np.dtype:
            make: Any = scalar
            found: np.dtype[Any] = np.dtype(make.type) if issubclass(make.type, np.generic) else make()
            return found
    return None
