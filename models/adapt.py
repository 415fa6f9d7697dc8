"""Plain functions, async functions and generators become models: their annotations say which messages they speak."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, closing
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar, final

import numpy as np
import trio

from models.blocking import iterate_steps, run_step
from models.errors import ModelError
from models.messages import (
    Family,
    Finish,
    InferRequest,
    InferResponse,
    Part,
    PartKind,
    Prompt,
    Tensor,
    Token,
)
from models.session import Session
from models.spec import Load, Model, ModelSpec, TensorSpec

F = TypeVar("F", bound=Callable[..., Any])

_FAMILY_OF: dict[Any, Family] = {
    Prompt: Family.TEXT,
    str: Family.TEXT,
    Token: Family.TEXT,
    InferRequest: Family.TENSOR,
    InferResponse: Family.TENSOR,
    np.ndarray: Family.TENSOR,
    Part: Family.PARTS,
    bytes: Family.PARTS,
}


def blocking(declared: bool) -> Callable[[F], F]:
    """Declares whether a synchronous function or generator blocks. They run in threads by default; `@blocking(False)`
    runs one on the event loop, which is right only for steps of well under a millisecond."""

    def mark(fn: F) -> F:
        fn.__model_blocking__ = declared  # type: ignore[attr-defined]
        return fn

    return mark


def spec_of(thing: Any, name: str = "", *, family: Family | None = None, **overrides: Any) -> ModelSpec:
    """A ModelSpec from whatever stands for a model.

    `thing` may be a ModelSpec; a function, async function, generator or async generator of one message (annotate its
    first parameter: Prompt or str, InferRequest or numpy arrays by name, Part or bytes); an async function of a
    Session (duplex); an object whose `__call__` is one of these; a functools.partial of one; or an async context manager
    function that yields one of these (loading and unloading around it). `overrides` are ModelSpec's fields. TypeError
    says what is missing.
    """
    if isinstance(thing, ModelSpec):
        return replace(thing, name=name or thing.name, family=family or thing.family, **overrides)
    name = name or getattr(_unbound(thing), "__name__", type(thing).__name__)
    if is_loader(thing):
        family = family or _loader_family(thing)
        return ModelSpec(name=name, family=family, load=_adapting(thing, family), **overrides)
    model, found = adapt(thing, family=family)
    signature = _declared_tensors(thing) if found is Family.TENSOR else {}
    return ModelSpec(name=name, family=found, load=_constant(model), **{**signature, **overrides})


def adapt(thing: Any, *, family: Family | None = None) -> tuple[Model, Family]:
    """The model that a callable stands for, and its family."""
    if not callable(thing) or inspect.isclass(thing):
        raise TypeError(f"{repr(thing)[:200]} is no model: give a function, a generator, or an object with __call__")
    name, fn = _name(thing), _code_of(thing)
    parameters = _parameters(thing)
    first = _unaliased(_hints(fn).get(parameters[0]))
    takes = typing.get_origin(first) or first
    if takes is Session or (first is None and parameters[0] == "session"):
        if not inspect.iscoroutinefunction(fn):
            raise TypeError(f"{name} takes a Session, so it must be an async function")
        found = _agreed(name, _family_in(first), family)
        if found is None:
            raise TypeError(f"{name}: say which messages it speaks, such as Session[Prompt, Token] or family=")
        if len(parameters) > 1:
            raise TypeError(f"{name}: a model takes a Session alone; give {_listed(parameters[1:])} a default")
        return thing, found
    found = _agreed(name, _FAMILY_OF.get(takes), family)
    if found is None:
        raise TypeError(
            f"{name}: annotate {parameters[0]!r} with Prompt, str, InferRequest, numpy.ndarray, Part, bytes or Session, "
            "or give family="
        )
    if found is Family.TENSOR and takes is not InferRequest:
        return _PerMessage(thing, fn, found, _arrays_of(parameters)), found
    if len(parameters) > 1:
        raise TypeError(f"{name}: a model takes one message; give {_listed(parameters[1:])} a default")
    arguments = _text_of if takes is str else _bytes_of if takes is bytes else _message_itself
    return _PerMessage(thing, fn, found, arguments), found


_Send: TypeAlias = Callable[[Any], Awaitable[None]]
_Arguments: TypeAlias = Callable[[Any], tuple[Any, ...]]


@final
class _PerMessage:
    """Calls a function once for each message received and sends what it returns or yields.

    The function never sees the session, so nothing else receives or sends meanwhile: the channel is used as it is.
    """

    def __init__(self, thing: Any, fn: Any, family: Family, arguments: _Arguments) -> None:
        self._call, self._family, self._arguments = thing, family, arguments
        self._whole = _WHOLE[family]
        self._kind: Callable[[_Send, tuple[Any, ...]], Awaitable[None]] = (
            self._async_generator if inspect.isasyncgenfunction(fn)
            else self._coroutine if inspect.iscoroutinefunction(fn)
            else self._generator if inspect.isgeneratorfunction(fn)
            else self._function
        )  # fmt: skip
        self._threads = bool(getattr(fn, "__model_blocking__", getattr(thing, "__model_blocking__", True)))
        self._limiter = trio.CapacityLimiter(64)

    async def __call__(self, session: Session[Any, Any]) -> None:
        channel = session.channel
        while True:
            try:
                message = await channel.receive()
            except trio.EndOfChannel:
                return
            await self._kind(channel.send, self._arguments(message))

    async def _coroutine(self, send: _Send, args: tuple[Any, ...]) -> None:
        item = await self._call(*args)
        if item is not None:
            await send(self._message(item))

    async def _function(self, send: _Send, args: tuple[Any, ...]) -> None:
        if self._threads:
            item = await run_step(lambda: self._call(*args), limiter=self._limiter)
        else:
            item = self._call(*args)
        if item is not None:
            await send(self._message(item))

    async def _async_generator(self, send: _Send, args: tuple[Any, ...]) -> None:
        await self._send_all(send, self._call(*args))

    async def _generator(self, send: _Send, args: tuple[Any, ...]) -> None:
        if self._threads:
            await self._send_all(send, iterate_steps(self._call(*args), limiter=self._limiter))
            return
        whole, made = self._whole, 0
        with closing(self._call(*args)) as generator:
            for item in generator:
                if type(item) in whole:
                    await send(item)
                else:
                    await send(self._message(item, made))
                    made += isinstance(item, str)

    async def _send_all(self, send: _Send, items: AsyncGenerator[Any, None]) -> None:
        whole, made = self._whole, 0
        async with aclosing(items):
            async for item in items:
                if type(item) in whole:
                    await send(item)
                else:
                    await send(self._message(item, made))
                    made += isinstance(item, str)

    def _message(self, item: Any, made: int = 0) -> Any:
        """The family's message that an item stands for; `made` were made of texts before it, which numbers tokens."""
        if type(item) in self._whole:
            return item
        match self._family:
            case Family.TEXT:
                if isinstance(item, str):
                    return Token(text=item, id=made)
            case Family.TENSOR:
                if isinstance(item, np.ndarray):
                    return InferResponse(outputs=(_tensor("OUTPUT0", item),))
                if isinstance(item, Mapping):
                    return InferResponse(outputs=tuple(_tensor(k, v) for k, v in item.items()))
            case Family.PARTS:
                if isinstance(item, str):
                    return Part(data=item.encode(), kind=PartKind.UTF8)
                if isinstance(item, (bytes, bytearray, memoryview)):
                    return Part(data=item)
        if isinstance(item, self._whole):
            return item
        raise TypeError(
            f"a {self._family.value} model answers with {_ANSWERS[self._family]}, and a generator yields them; "
            f"this one gave {type(item).__name__}"
        )


def _message_itself(message: Any) -> tuple[Any, ...]:
    return (message,)


def _text_of(message: Prompt) -> tuple[Any, ...]:
    return (message.text,)


def _bytes_of(message: Part) -> tuple[Any, ...]:
    return (bytes(message.data),)


def _arrays_of(names: Sequence[str]) -> _Arguments:
    """The inputs of these names, in this order."""
    wanted = set(names)

    def arrays(message: InferRequest) -> tuple[Any, ...]:
        given = {t.name: t.data for t in message.inputs}
        if given.keys() != wanted:
            text = f"expected inputs {_listed(names)}; got {_listed(given)}"
            raise ModelError(text[:200], code="BadInputs", status=400)
        return tuple([given[name] for name in names])

    return arrays


# What is sent as it is.
_WHOLE: Mapping[Family, tuple[type, ...]] = {
    Family.TEXT: (Token, Finish),
    Family.TENSOR: (InferResponse,),
    Family.PARTS: (Part,),
}

_ANSWERS = {
    Family.TEXT: "str, Token or Finish",
    Family.TENSOR: "InferResponse, a numpy array or a dict of arrays",
    Family.PARTS: "Part, bytes or str",
}


def _tensor(name: str, value: Any) -> Tensor:
    data = np.asarray(value)
    if data.dtype.kind == "U":
        data = np.char.encode(data, "utf-8")
    if data.dtype.kind == "S":
        data = data.astype(object)  # the form of BYTES
    return Tensor(name=name, data=data)


def _agreed(name: str, annotated: Family | None, given: Family | None) -> Family | None:
    if annotated and given and annotated is not given:
        raise TypeError(f"{name}: its annotation says {annotated.value} and family= says {given.value}; change one of them")
    return annotated or given


def _family_in(hint: Any) -> Family | None:
    """The family that an annotation tells of, however deep: a message, a Session or Callable of messages, a class that
    is called with them."""
    hint = _unaliased(hint)
    inner = hint if isinstance(hint, list) else typing.get_args(hint)
    kind = typing.get_origin(hint) or hint
    if inspect.isclass(kind):
        if kind in _FAMILY_OF:
            return _FAMILY_OF[kind]
        call = getattr(kind, "__call__", None)  # noqa: B004  # its annotations are wanted, not whether it is there
        if inspect.isfunction(call):
            inner = (*(v for k, v in _hints(call).items() if k != "return"), *inner)
    return next((found for one in inner if (found := _family_in(one))), None)


def _unaliased(hint: Any) -> Any:
    """What an alias made by a `type` statement stands for; numpy's NDArray is one."""
    while (value := getattr(typing.get_origin(hint) or hint, "__value__", None)) is not None:
        hint = value
    return hint


def _parameters(thing: Any) -> list[str]:
    """The names of the arguments that have to be given, by position."""
    try:
        required = [p for p in inspect.signature(thing).parameters.values() if p.default is p.empty]
    except ValueError:
        raise TypeError(f"{_name(thing)} does not tell its parameters: wrap it in a function that does") from None
    if named := [p.name for p in required if p.kind is p.KEYWORD_ONLY]:
        raise TypeError(f"{_name(thing)}: arguments are given by position; give {_listed(named)} a default")
    found = [p.name for p in required if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not found:
        raise TypeError(f"{_name(thing)} takes no argument: a model takes a Session or one message")
    return found


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _hints(fn: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(fn)
    except (NameError, AttributeError) as e:
        raise TypeError(
            f"{_name(fn)}: an annotation cannot be resolved: {e}; import it at run time, not under TYPE_CHECKING"
        ) from e


def _unbound(thing: Any) -> Any:
    while isinstance(thing, functools.partial):
        thing = thing.func
    return thing


def _code_of(thing: Any) -> Any:
    """What is run when a callable is called: it tells annotations, and whether it is async or a generator."""
    inner = _unbound(thing)
    return inner if inspect.isroutine(inner) else type(inner).__call__


def _name(thing: Any) -> str:
    return getattr(_unbound(thing), "__qualname__", None) or type(thing).__name__


def _declared_tensors(thing: Any) -> dict[str, tuple[TensorSpec, ...]]:
    """`inputs` and `outputs` attributes, where a model carries them."""
    return {k: tuple(getattr(thing, k)) for k in ("inputs", "outputs") if isinstance(getattr(thing, k, None), list | tuple)}


def made_family(factory: Any) -> Family | None:
    """The family of what a class or a factory function makes, as its annotations say it; None where they do not."""
    made = factory if inspect.isclass(factory) else _hints(factory).get("return")
    return _family_in(made) if inspect.isfunction(getattr(made, "__call__", None)) else None  # noqa: B004  # a class, called


def partial_loader(loader: Any, options: Mapping[str, Any]) -> Any:
    """An async context manager function with its options bound."""

    @functools.wraps(loader.__wrapped__)
    async def bound() -> AsyncGenerator[Any, None]:
        async with loader(**options) as model:
            yield model

    return asynccontextmanager(bound)


def is_loader(thing: Any) -> bool:
    """A function or method decorated with asynccontextmanager."""
    return inspect.isroutine(thing) and inspect.isasyncgenfunction(getattr(thing, "__wrapped__", None))


def _loader_family(thing: Any) -> Family:
    found = _family_in(_hints(thing.__wrapped__).get("return"))
    if found is None:
        raise TypeError(
            f"{_name(thing)}: say what it yields, such as "
            "AsyncIterator[Callable[[Session[Prompt, Token]], Awaitable[None]]], or give family="
        )
    return found


def _adapting(loader: Callable[[], AbstractAsyncContextManager[Any]], family: Family) -> Load:
    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        async with loader() as thing:
            yield adapt(thing, family=family)[0]

    return load


def _constant(model: Model) -> Load:
    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        yield model

    return load
