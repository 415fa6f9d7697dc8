"""Plain functions, async functions and generators become models: their annotations say which messages they speak."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar, final

import numpy as np
import trio

from models.blocking import run_step
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
_END = object()

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
    Session (duplex); an object whose `__call__` is one of these; or an async context manager function that yields one
    of these (loading and unloading around it). `overrides` are ModelSpec's fields. TypeError says what is missing.
    """
    if isinstance(thing, ModelSpec):
        changes = {k: v for k, v in {"name": name, "family": family, **overrides}.items() if v}
        return replace(thing, **changes)
    declared: dict[str, Any] = dict(getattr(thing, "__model_spec__", {}))
    name = name or declared.pop("name", "") or getattr(thing, "__name__", type(thing).__name__)
    family = family or declared.pop("family", None)
    if is_loader(thing):
        if family is None:
            family = _loader_family(thing)
        return ModelSpec(name=name, family=family, load=_adapting(thing, family), **{**declared, **overrides})
    model, found = adapt(thing, family=family)
    signature = _declared_tensors(thing) if found is Family.TENSOR else {}
    return ModelSpec(name=name, family=found, load=_constant(model), **{**signature, **declared, **overrides})


def adapt(thing: Any, *, family: Family | None = None) -> tuple[Model, Family]:
    """The model that a callable stands for, and its family."""
    if not callable(thing) or inspect.isclass(thing):
        raise TypeError(f"{thing!r} is no model: give a function, a generator, or an object with __call__")
    fn = thing if inspect.isroutine(thing) else type(thing).__call__
    parameters = _parameters(thing)
    if not parameters:
        raise TypeError(f"{_name(thing)} takes no argument: a model takes a Session or one message")
    hints = _hints(fn)
    first = hints.get(parameters[0].name)
    origin = typing.get_origin(first) or first
    if origin is Session or (first is None and parameters[0].name == "session"):
        if not inspect.iscoroutinefunction(fn):
            raise TypeError(f"{_name(thing)} takes a Session, so it must be an async function")
        found = family or _family_of(*typing.get_args(first))
        if found is None:
            raise TypeError(f"{_name(thing)}: say which messages it speaks, such as Session[Prompt, Token] or family=")
        return thing, found
    found = family or _family_of(origin)
    if found is None:
        raise TypeError(
            f"{_name(thing)}: annotate {parameters[0].name!r} with Prompt, str, InferRequest, numpy.ndarray, Part, bytes "
            "or Session, or give family="
        )
    arrays = [p.name for p in parameters] if found is Family.TENSOR and origin is not InferRequest else None
    return _PerMessage(thing, fn, found, origin, arrays), found


@final
class _PerMessage:
    """Calls a function once for each message received and sends what it returns or yields."""

    def __init__(self, thing: Any, fn: Any, family: Family, takes: Any, arrays: list[str] | None) -> None:
        self._call, self._family, self._takes, self._arrays = thing, family, takes, arrays
        self._kind = (
            self._async_generator if inspect.isasyncgenfunction(fn)
            else self._coroutine if inspect.iscoroutinefunction(fn)
            else self._generator if inspect.isgeneratorfunction(fn)
            else self._function
        )  # fmt: skip
        self._threads = bool(getattr(fn, "__model_blocking__", getattr(thing, "__model_blocking__", True)))
        self._limiter: trio.CapacityLimiter | None = None

    async def __call__(self, session: Session[Any, Any]) -> None:
        async for message in session:
            sender = _Sender(session, self._family)
            args, kwargs = self._arguments(message)
            await self._kind(sender, args, kwargs)

    def _arguments(self, message: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._takes is str:
            return (message.text,), {}
        if self._takes is bytes:
            return (bytes(message.data),), {}
        if self._arrays is not None:
            given = {t.name: t.data for t in message.inputs}
            missing = [n for n in self._arrays if n not in given]
            if missing or len(given) != len(self._arrays):
                raise ModelError(f"expected inputs {self._arrays}, got {list(given)}", code="BadInputs", status=400)
            return (), given
        return (message,), {}

    async def _coroutine(self, sender: _Sender, args: Any, kwargs: Any) -> None:
        await sender.last(await self._call(*args, **kwargs))

    async def _async_generator(self, sender: _Sender, args: Any, kwargs: Any) -> None:
        generator: AsyncGenerator[Any, None] = self._call(*args, **kwargs)
        async with aclosing(generator):
            async for item in generator:
                await sender.send(item)

    async def _function(self, sender: _Sender, args: Any, kwargs: Any) -> None:
        await sender.last(await self._step(lambda: self._call(*args, **kwargs)))

    async def _generator(self, sender: _Sender, args: Any, kwargs: Any) -> None:
        generator: Generator[Any, None, None] = self._call(*args, **kwargs)
        busy = False

        def step() -> Any:
            nonlocal busy
            busy = True
            try:
                return next(generator, _END)
            finally:
                busy = False

        try:
            while (item := await self._step(step)) is not _END:
                await sender.send(item)
        finally:
            if not busy:  # an abandoned step still runs in it; it is closed when that thread drops it
                generator.close()

    async def _step(self, fn: Callable[[], Any]) -> Any:
        if not self._threads:
            return fn()
        if self._limiter is None:
            self._limiter = trio.CapacityLimiter(64)
        return await run_step(fn, limiter=self._limiter)


@final
class _Sender:
    """Turns what functions return into messages of the family."""

    def __init__(self, session: Session[Any, Any], family: Family) -> None:
        self._session, self._family = session, family
        self._tokens = 0

    async def send(self, item: Any) -> None:
        await self._session.send(self._message(item))

    async def last(self, item: Any) -> None:
        if item is not None:
            await self.send(item)

    def _message(self, item: Any) -> Any:
        match self._family:
            case Family.TEXT:
                if isinstance(item, str):
                    self._tokens += 1
                    return Token(text=item, id=self._tokens - 1)
                if isinstance(item, Token | Finish):
                    return item
            case Family.TENSOR:
                if isinstance(item, InferResponse):
                    return item
                if isinstance(item, np.ndarray):
                    return InferResponse(outputs=(Tensor(name="OUTPUT0", data=item),))
                if isinstance(item, Mapping):
                    return InferResponse(outputs=tuple(Tensor(name=k, data=np.asarray(v)) for k, v in item.items()))
            case Family.PARTS:
                if isinstance(item, Part):
                    return item
                if isinstance(item, str):
                    return Part(data=item.encode(), kind=PartKind.UTF8)
                if isinstance(item, bytes | bytearray | memoryview):
                    return Part(data=item)
        raise TypeError(f"a {self._family.value} model cannot answer with {type(item).__name__}")


def _family_of(*hints: Any) -> Family | None:
    for hint in hints:
        for one in typing.get_args(hint) or (hint,):
            found = _FAMILY_OF.get(typing.get_origin(one) or one)
            if found is not None:
                return found
    return None


def _parameters(thing: Any) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p for p in inspect.signature(thing).parameters.values() if p.kind in kinds and p.default is p.empty]


def _hints(fn: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(fn)
    except NameError as e:
        raise TypeError(f"{_name(fn)}: an annotation cannot be resolved: {e}") from e


def _name(thing: Any) -> str:
    return getattr(thing, "__qualname__", None) or type(thing).__name__


def _declared_tensors(thing: Any) -> dict[str, tuple[TensorSpec, ...]]:
    """`inputs` and `outputs` attributes, where a model carries them."""
    return {k: tuple(getattr(thing, k)) for k in ("inputs", "outputs") if isinstance(getattr(thing, k, None), list | tuple)}


def made_family(factory: Any) -> Family | None:
    """The family of what a class or a factory function makes, as its annotations say it; None where they do not."""
    made = factory if inspect.isclass(factory) else _hints(factory).get("return")
    call = made.__dict__.get("__call__") if inspect.isclass(made) else None
    if call is None:
        return None
    parameters = list(inspect.signature(call).parameters)[1:]
    if not parameters:
        return None
    first = _hints(call).get(parameters[0])
    return _family_of(*(typing.get_args(first) if typing.get_origin(first) is Session else (first,)))


def partial_loader(loader: Any, options: Mapping[str, Any]) -> Any:
    """An async context manager function with its options bound."""

    @functools.wraps(loader.__wrapped__)
    async def bound() -> AsyncGenerator[Any, None]:
        async with loader(**options) as model:
            yield model

    return asynccontextmanager(bound)


def is_loader(thing: Any) -> bool:
    """A function decorated with asynccontextmanager."""
    inner = getattr(thing, "__wrapped__", None)
    return inspect.isfunction(thing) and inner is not None and inspect.isasyncgenfunction(inner)


def _loader_family(thing: Any) -> Family:
    returned = _hints(thing.__wrapped__).get("return")
    for hint in typing.get_args(returned):
        for inner in (hint, *typing.get_args(hint)):
            nested = [a for a in typing.get_args(inner) if a] or [inner]
            found = _family_of(*[x for n in nested for x in (typing.get_args(n) or (n,)) if not isinstance(x, list)])
            if found is not None:
                return found
    raise TypeError(f"{_name(thing)}: give family=, or yield a Callable[[Session[Prompt, Token]], Awaitable[None]]")


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
