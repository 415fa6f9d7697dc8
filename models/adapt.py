"""Makes models of plain functions, async functions and generators, whose annotations tell their messages."""

from __future__ import annotations

import functools
import inspect
import operator
import typing
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar, final

import msgspec
import numpy as np
import numpy.typing as npt
import trio

from models.annotations import hints_of, input_specs, is_named_tuple, output_specs, text_inputs, unaliased
from models.blocking import codec_threads, in_thread, iterate_steps, run_step, step_holder, throw
from models.errors import BAD_INPUTS, ModelError
from models.messages import (
    BytesTensor,
    Family,
    Finish,
    InferRequest,
    InferResponse,
    Part,
    PartKind,
    Prompt,
    Tensor,
    Token,
    ToolCall,
    utf8,
)
from models.rows import elements_of
from models.session import Channel, Session
from models.spec import DECLARED, MARK, Load, Model, ModelSpec, TensorSpec, context_of
from models.tracebacks.frames import blamed

F = TypeVar("F", bound=Callable[..., Any])

AT_ONCE = 4096
"""The most elements that become objects, or are examined one by one, on the event loop."""
STEP = 16_384
"""Elements in one step of a thread: a few milliseconds of the interpreter."""
_SHORT = 64 * 1024  # bytes that are quick to copy
_LONG = 2 * 1024 * 1024  # bytes whose copying would delay the loop
_ROWS = 64  # numbers in a list that is converted on the loop
_OBJECT = 64  # bytes of memory that an element takes beyond its content
_WIDEST = 256 * 1024 * 1024  # bytes of an array of str_, of several elements

_FAMILY_OF: dict[Any, Family] = {
    Prompt: Family.TEXT,
    str: Family.TEXT,
    Token: Family.TEXT,
    ToolCall: Family.TEXT,
    InferRequest: Family.TENSOR,
    InferResponse: Family.TENSOR,
    np.ndarray: Family.TENSOR,
    Part: Family.PARTS,
    bytes: Family.PARTS,
}


def blocking(declared: bool) -> Callable[[F], F]:
    """Declares that a synchronous function or generator blocks, or not. They run in threads by default. `@blocking(False)`
    runs one on the event loop, where it blocks every other session: use it only for steps well under 1 ms."""

    def mark(fn: F) -> F:
        fn.__model_blocking__ = declared  # type: ignore[attr-defined]
        return fn

    return mark


def spec_of(thing: Any, name: str = "", *, family: Family | None = None, **overrides: Any) -> ModelSpec:
    """A ModelSpec for any object that can be a model.

    `thing` is one of these: a ModelSpec; a function, async function, generator or async generator of one message, whose
    first parameter is annotated as Prompt or str, InferRequest or numpy arrays by name, Part or bytes; an async function of
    a Session (duplex); an object whose `__call__` is one of these; a functools.partial of one; or an async context manager
    function that yields one, with loading before and unloading after it. `overrides` are fields of ModelSpec. Without them,
    a tensor model's declarations, by annotations or by `models.spec.declare`, are in the spec. TypeError if something is
    missing.
    """
    if isinstance(thing, ModelSpec):
        return replace(thing, name=name or thing.name, family=family or thing.family, **overrides)
    name = name or getattr(_unbound(thing), "__name__", type(thing).__name__)
    if is_loader(thing):
        family = family or _loader_family(thing)
        return ModelSpec(name=name, family=family, load=_adapting(thing, family), **{**declared(thing, family), **overrides})
    model, found = adapt(thing, family=family)
    return ModelSpec(name=name, family=found, load=_constant(model), **{**declared(thing, found), **overrides})


def adapt(thing: Any, *, family: Family | None = None) -> tuple[Model, Family]:
    """The model that a callable makes, and its family."""
    if not callable(thing) or inspect.isclass(thing):
        raise TypeError(f"{repr(thing)[:200]} is no model: give a function, a generator, or an object with __call__")
    name, fn = _name(thing), _code_of(thing)
    parameters, hints = _parameters(thing), hints_of(fn)
    first, takes = _taken(parameters[0], hints)
    if takes is None and _takes_request(thing, parameters):
        takes = InferRequest
    if family is None and is_declared(thing) and (takes is None or takes is Session):
        family = _family_in(first) or Family.TENSOR
    if takes is Session:
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
        by_position = _by_position(thing)
        inputs = input_specs(name, by_position, hints)
        texts = text_inputs([spec.name for spec in inputs], hints)
        return _PerMessage(thing, fn, found, _arrays_of(by_position, inputs), texts), found
    if len(parameters) > 1:
        raise TypeError(f"{name}: a model takes one message; give {_listed(parameters[1:])} a default")
    arguments = _text_of if takes is str else _bytes_of if takes is bytes else _message_itself
    return _PerMessage(thing, fn, found, arguments), found


_Channel: TypeAlias = Channel[Any, Any]
_Texts: TypeAlias = Mapping[str, np.dtype[Any]]
_NO_TEXTS: _Texts = {}
_Arguments: TypeAlias = Callable[[Any], tuple[Any, ...]]


@final
class _PerMessage:
    """Calls a function once for each received message, and sends what it returns or yields.

    The function never sees the session, so nothing else receives or sends meanwhile, and the channel is used directly.
    """

    def __init__(self, thing: Any, fn: Any, family: Family, arguments: _Arguments, texts: _Texts = _NO_TEXTS) -> None:
        self._call, self._family, self._arguments, self._texts = thing, family, arguments, texts
        self._whole = _WHOLE[family]
        self._tensors = family is Family.TENSOR
        self._measure = partial(_texts_of, texts) if texts else _MEASURES.get(arguments, elements_of)
        """Returns the elements and bytes to be made of a message before the function gets it. None: there are never any."""
        self._kind: Callable[[_Channel, Any, Callable[[], None]], Awaitable[None]] = (
            self._async_generator if inspect.isasyncgenfunction(fn)
            else self._coroutine if inspect.iscoroutinefunction(fn)
            else self._generator if inspect.isgeneratorfunction(fn)
            else self._function
        )  # fmt: skip
        self._threads = bool(getattr(fn, "__model_blocking__", getattr(thing, "__model_blocking__", True)))
        # the properties of a text model
        self.parameters = getattr(thing, "parameters", None)
        self.chat_template = getattr(thing, "chat_template", None)
        self.count_tokens = getattr(thing, "count_tokens", None)
        self.features = getattr(thing, "features", None)
        self.check_format = getattr(thing, "check_format", None)
        self.context = context_of(thing)

    async def __call__(self, session: Session[Any, Any]) -> None:
        channel, measure = session.channel, self._measure
        while True:
            try:
                message = await channel.receive()
            except trio.EndOfChannel:
                return
            if measure is not None and (size := measure(message)) is not None:
                await self._convert_and_call(channel, message, *size)
            else:
                await self._kind(channel, message, _nothing)

    async def _convert_and_call(self, channel: _Channel, message: Any, elements: int, size: int) -> None:
        """Calls the function with objects made of the message: `elements` of them, of `size` bytes. Their memory is reserved
        before, and as long as the function has them."""
        holder = step_holder()
        reserved = [holder.reserve(_OBJECT * elements + size)]

        def give_back() -> None:
            while reserved:
                reserved.pop()()

        threads = self._threads and self._kind in (self._function, self._generator)
        if threads and not self._texts:
            await self._kind(channel, message, give_back)  # converted in its thread
            return
        try:
            # an array of str_ is as wide everywhere as its longest element
            here = elements <= AT_ONCE and size * (1 + 4 * elements if self._texts else 1) <= _LONG
            steps = _convert(message, self._texts)
            while type(made := _next(steps) if here else await _next_beside(steps)) is int:
                if made:
                    reserved.append(holder.reserve(made))
            if not threads:
                await self._kind(channel, made, _nothing)
        except BaseException:
            give_back()
            raise
        if threads:
            await self._kind(channel, made, give_back)
        else:
            give_back()

    async def _coroutine(self, channel: _Channel, message: Any, ended: Callable[[], None]) -> None:
        item = await self._call(*self._arguments(message))
        if item is not None:
            if self._tensors and _is_long(item):
                item = await self._message_beside(item)
            await channel.send(self._message(item))

    async def _function(self, channel: _Channel, message: Any, ended: Callable[[], None]) -> None:
        if self._threads:
            item = await run_step(partial(self._step, message), ended=ended)
        else:
            item = self._call(*self._arguments(message))
            if self._tensors and _is_long(item):
                item = await self._message_beside(item)
        if item is not None:
            await channel.send(self._message(item))

    def _step(self, message: Any) -> Any:
        """Converts the message, calls the function, and converts its result, all in its thread."""
        item = self._call(*self._arguments(self._ready(message)))
        return item if item is None else self._message(item)

    def _ready(self, message: Any) -> Any:
        if self._measure is None or self._measure(message) is None:
            return message
        return _all_of(_convert(message, self._texts))

    async def _message_beside(self, item: Any) -> Any:
        """The message for an item whose conversion takes long."""
        return await in_thread(partial(self._message, item), limiter=codec_threads(), expected=(TypeError,))

    async def _async_generator(self, channel: _Channel, message: Any, ended: Callable[[], None]) -> None:
        await self._send_all(channel, self._call(*self._arguments(message)))

    async def _generator(self, channel: _Channel, message: Any, ended: Callable[[], None]) -> None:
        if self._threads:
            await self._send_all(channel, iterate_steps(self._steps(message), ended=ended))
            return
        whole, made, try_send = self._whole, 0, _try_send_of(channel)
        with closing(self._call(*self._arguments(message))) as generator:
            for item in generator:
                if try_send(item):
                    continue
                if type(item) not in whole:
                    item, made = self._message(item, made), made + isinstance(item, str)
                await channel.send(item)

    def _steps(self, message: Any) -> Generator[Any, None, None]:
        """Yields the generator's items, in its thread. A tensor model's are converted to messages there, which may take
        long."""
        if self._measure is None:
            steps: Generator[Any, None, None] = self._call(*self._arguments(message))
            return steps
        return self._converted(message)

    def _converted(self, message: Any) -> Generator[Any, None, None]:
        with closing(self._call(*self._arguments(self._ready(message)))) as generator:
            for item in generator:
                yield self._message(item) if self._tensors else item

    async def _send_all(self, channel: _Channel, items: AsyncGenerator[Any, None]) -> None:
        whole, made, try_send = self._whole, 0, _try_send_of(channel)
        async with aclosing(items):
            async for item in items:
                if try_send(item):
                    continue
                if type(item) not in whole:
                    if self._tensors and _is_long(item):
                        item = await self._message_beside(item)
                    else:
                        item, made = self._message(item, made), made + isinstance(item, str)
                await channel.send(item)

    def _message(self, item: Any, made: int = 0) -> Any:
        """The message of the family for an item. `made` tokens were made of texts before it: it numbers them."""
        if type(item) in self._whole:
            return item
        match self._family:
            case Family.TEXT:
                if isinstance(item, str):
                    return Token(text=item, id=made)
            case Family.TENSOR:
                if isinstance(item, _OUTPUT0):
                    return InferResponse(outputs=(_tensor("OUTPUT0", item),))
                if isinstance(item, Mapping):
                    return InferResponse(outputs=tuple(_tensor(k, v) for k, v in item.items()))
                if is_named_tuple(type(item)):
                    return self._message(item._asdict())
            case Family.PARTS:
                if isinstance(item, str):
                    return Part(data=utf8(item), kind=PartKind.UTF8)
                if isinstance(item, (bytes, bytearray, memoryview)):
                    return Part(data=item)
        if isinstance(item, self._whole):
            return item
        said = f"a {self._family.value} model answers with {_ANSWERS[self._family]}, and a generator yields them"
        throw(blamed(TypeError(f"{said}; this one gave {type(item).__name__}"), self._call))


def _try_send_of(channel: _Channel) -> Callable[[Any], bool]:
    return getattr(channel, "try_send", _not_at_once)


def _not_at_once(message: Any) -> bool:
    return False


def _message_itself(message: Any) -> tuple[Any, ...]:
    return (message,)


def _text_of(message: Prompt) -> tuple[Any, ...]:
    return (message.text,)


def _bytes_of(message: Part) -> tuple[Any, ...]:
    return (bytes(message.data),)


def _copied_of(message: Part) -> tuple[int, int] | None:
    """The bytes of a part that must be copied for a function of `bytes`. None: few or none."""
    return None if type(message.data) is bytes or len(message.data) <= _SHORT else (0, len(message.data))


# The measure of the objects made of a message, by the function that makes the arguments. For arrays: `elements_of`.
_MEASURES: Mapping[Any, Callable[[Any], tuple[int, int] | None] | None] = {
    _message_itself: None, _text_of: None, _bytes_of: _copied_of,
}  # fmt: skip


def _texts_of(texts: _Texts, message: InferRequest) -> tuple[int, int] | None:
    """Does `elements_of` for a function that takes some inputs as text. Beyond AT_ONCE elements, the bytes of those that are
    objects already are not counted: they are converted in a thread in any case."""
    elements, size = elements_of(message) or (0, 0)
    found = [given for tensor in message.inputs if tensor.name in texts and not _is_text(given := _given(tensor))]
    if not found:
        return (elements, size) if elements else None
    elements += sum([given.size for given in found])
    if elements <= AT_ONCE:
        size += sum([sum(map(len, given.reshape(-1).tolist())) for given in found if isinstance(given, np.ndarray)])
    return elements, size


def _given(tensor: Tensor) -> Any:
    return tensor.given if type(tensor) is BytesTensor else tensor.data


def _is_text(given: Any) -> bool:
    """True unless they are bytes, or objects, that text must be made of."""
    return isinstance(given, np.ndarray) and given.dtype.kind not in "OS"


def _convert(message: Any, texts: _Texts = _NO_TEXTS) -> Generator[int, None, Any]:
    """Makes a separate message for the function, in steps of a few milliseconds, and returns it. The received message is
    unchanged. It yields the bytes of memory that the next step takes beyond what `_measure` said."""
    if isinstance(message, Part):
        yield 0
        return msgspec.structs.replace(message, data=bytes(message.data))
    inputs = []
    for tensor in message.inputs:
        if type(tensor) is BytesTensor:
            given = tensor.given
            if not isinstance(given, np.ndarray) and not given.made:
                flat = np.empty(given.size, object)
                for _ in given.fill(flat):
                    yield 0
                flat.setflags(write=False)
                tensor = msgspec.structs.replace(tensor, data=flat.reshape(given.shape))
        if tensor.name in texts and not _is_text(tensor.data):
            data = yield from _as_texts(tensor, texts[tensor.name])
            tensor = Tensor(
                name=tensor.name, data=data, datatype=tensor.datatype, parameters=tensor.parameters, whole=tensor.whole
            )
        inputs.append(tensor)
    return msgspec.structs.replace(message, inputs=tuple(inputs))


_is_ascii = operator.methodcaller("isascii")


def _as_texts(tensor: Tensor, dtype: np.dtype[Any]) -> Generator[int, None, npt.NDArray[Any]]:
    """The array of a tensor's elements as text. ModelError if one is not UTF-8, or is no value of the dtype."""
    flat, count, texts = tensor.data.reshape(-1), tensor.data.size, list[str]()
    for start in range(0, count, STEP):
        items = flat[start : start + STEP].tolist()
        yield sum(map(len, items)) * (1 if all(map(_is_ascii, items)) else 4)
        try:
            texts += [item.decode() if type(item) is bytes else item for item in items]
        except UnicodeDecodeError as e:
            at = start + next(i for i, item in enumerate(items) if type(item) is bytes and item == e.object)
            raise _not_text(tensor, f"element {at} is not UTF-8: {e.reason} at byte {e.start}") from None
    step = STEP
    if dtype.kind == "U":  # each element takes as much memory as the longest
        longest = max(map(len, texts), default=0) or 1
        size = 4 * longest * count
        if size > _WIDEST and count > 1:
            raise _not_text(
                tensor,
                f"numpy's str_ takes {size} bytes for {count} elements as long as the longest, of {longest} characters, "
                f"and at most {_WIDEST} are made; a model that is annotated with StringDType takes them",
            )
        if (cut := next((i for i, text in enumerate(texts) if text.endswith("\0")), None)) is not None:
            raise _not_text(tensor, f"element {cut} ends with a NUL character, which numpy's str_ leaves out")
        dtype, step = np.dtype(f"U{longest}"), max(1, min(STEP, _LONG // (4 * longest)))
    yield count * dtype.itemsize
    made = np.empty(count, dtype)
    for start in range(0, count, step):
        made[start : start + step] = texts[start : start + step]
        yield 0
    made.setflags(write=False)
    return made.reshape(tensor.data.shape)


def _not_text(tensor: Tensor, why: str) -> ModelError:
    return ModelError(f"input {tensor.name[:60]!r} is text for the model: {why}", code=BAD_INPUTS, status=400)


def _all_of(steps: Generator[int, None, Any]) -> Any:
    while type(made := _next(steps)) is int:
        pass
    return made


def _next(steps: Generator[int, None, Any]) -> Any:
    """Runs one step. Returns the message after the last step, and a number of bytes before."""
    try:
        return next(steps)
    except StopIteration as end:
        return end.value


async def _next_beside(steps: Generator[int, None, Any]) -> Any:
    """Does `_next` in a thread."""
    return await in_thread(partial(_next, steps), limiter=codec_threads(), expected=(ModelError,))


def _nothing() -> None:
    """Does nothing, because nothing was reserved."""


def _arrays_of(parameters: Iterable[inspect.Parameter], inputs: Iterable[TensorSpec]) -> _Arguments:
    """The arrays of these inputs, in the order of their parameters. A parameter without an array gets its default."""
    optional = {spec.name: spec.optional for spec in inputs}
    required = {name for name, may_miss in optional.items() if not may_miss}
    order = [(p.name, p.default) for p in parameters]
    while order[-1][0] not in optional:
        order.pop()

    def arrays(message: InferRequest) -> tuple[Any, ...]:
        given = {t.name: t.data for t in message.inputs}
        if given.keys() != required and not required <= given.keys() <= optional.keys():
            wanted = [f"{name} (optional)" if may_miss else name for name, may_miss in optional.items()]
            text = f"expected inputs {_listed(wanted)}; got {_listed(given)}"
            raise ModelError(text[:200], code=BAD_INPUTS, status=400)
        return tuple([given.get(name, default) for name, default in order])

    return arrays


# The annotations of generators, whose argument is the yielded type.
_YIELDS = (Iterator, Iterable, Generator, AsyncIterator, AsyncIterable, AsyncGenerator)

# Types that are the only output of a function of arrays; a number has no dimensions.
_OUTPUT0 = (np.ndarray, np.generic, int, float)

# Types that are sent unchanged.
_WHOLE: Mapping[Family, tuple[type, ...]] = {
    Family.TEXT: (Token, ToolCall, Finish),
    Family.TENSOR: (InferResponse,),
    Family.PARTS: (Part,),
}

_ANSWERS = {
    Family.TEXT: "str, Token, ToolCall or Finish",
    Family.TENSOR: "InferResponse, a numpy array, a number, or a dict or NamedTuple of arrays",
    Family.PARTS: "Part, bytes or str",
}


def _tensor(name: str, value: Any) -> Tensor:
    data = np.asarray(value)
    if data.dtype.kind in "SUT":
        data = _objects(name, data)  # the form of BYTES
    return Tensor(name=name, data=data)


def _objects(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The texts of an array as objects of type `bytes`, made in steps of a few milliseconds. ModelError for an element of a
    StringDType that is missing."""
    text, flat, objects = array.dtype.kind != "S", array.reshape(-1), np.empty(array.size, object)
    for start in range(0, array.size, STEP):
        items = flat[start : start + STEP].tolist()
        if text:
            if array.dtype.kind == "T" and (missing := [i for i, item in enumerate(items) if not isinstance(item, str)]):
                at = f"element {start + missing[0]} of a StringDType is missing (na_object): give it a text"
                raise ModelError(f"output {name[:60]!r}: {at}", code="BadOutput", status=500)
            items = [item.encode() for item in items]
        objects[start : start + STEP] = items
    return objects.reshape(array.shape)


def _is_long(item: Any) -> bool:
    """True if an answer has too many elements to examine on the event loop."""
    if type(item) is np.ndarray:
        return item.dtype.kind in "SUT" and item.size > AT_ONCE
    if isinstance(item, Mapping):
        return any(map(_is_long, item.values()))
    if isinstance(item, list | tuple):  # rows that become an array, unless they have names
        if is_named_tuple(type(item)):
            return any(map(_is_long, item))
        return len(item) > _ROWS or any(isinstance(value, list | tuple | np.ndarray) for value in item)
    return False


def _agreed(name: str, annotated: Family | None, given: Family | None) -> Family | None:
    if annotated and given and annotated is not given:
        raise TypeError(f"{name}: its annotation says {annotated.value} and family= says {given.value}; change one of them")
    return annotated or given


def _family_in(hint: Any) -> Family | None:
    """The family of an annotation, at any depth: a message, a Session or Callable of messages, or a class that is called
    with them."""
    hint = unaliased(hint)
    inner = hint if isinstance(hint, list) else typing.get_args(hint)
    kind = typing.get_origin(hint) or hint
    if inspect.isclass(kind):
        if kind in _FAMILY_OF:
            return _FAMILY_OF[kind]
        call = getattr(kind, "__call__", None)  # noqa: B004  # its annotations are wanted, not whether it is there
        if inspect.isfunction(call):
            inner = (*(v for k, v in hints_of(call).items() if k != "return"), *inner)
    return next((found for one in inner if (found := _family_in(one))), None)


def _taken(name: str, hints: Mapping[str, Any]) -> tuple[Any, Any]:
    """The annotation of the first parameter, and its type."""
    first = unaliased(hints.get(name))
    return first, Session if first is None and name == "session" else typing.get_origin(first) or first


def is_declared(thing: Any) -> bool:
    """True if `models.spec.declare` has marked it as a tensor model, or as a factory of one."""
    return bool(getattr(_unbound(thing), MARK, False))


def _takes_request(thing: Any, required: list[str]) -> bool:
    """True if a function marked by `declare` takes the whole request as its one unannotated parameter: one that is named
    `request`, or unlike any of the declared inputs."""
    if not is_declared(thing) or len(required) != 1:
        return False
    inputs = getattr(_unbound(thing), "inputs", None)
    if inputs is None:
        return required[0] == "request"
    return required[0] not in [tensor.name for tensor in inputs]


def _parameters(thing: Any) -> list[str]:
    """The names of the positional arguments without a default."""
    try:
        required = [p for p in inspect.signature(thing).parameters.values() if p.default is p.empty]
    except ValueError:
        raise TypeError(f"{_name(thing)} does not tell its parameters: wrap it in a function that does") from None
    if named := [p.name for p in required if p.kind is p.KEYWORD_ONLY]:
        raise TypeError(f"{_name(thing)}: arguments are given by position; give {_listed(named)} a default")
    found = [p.name for p in required if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not found:
        said = "a model takes a Session, one message, or arrays of which one has no default"
        raise TypeError(f"{_name(thing)} has no argument that must be given: {said}")
    return found


def _by_position(thing: Any) -> list[inspect.Parameter]:
    """The positional parameters of a callable; for a class, those of its objects' `__call__`."""
    parameters = inspect.signature(thing.__call__ if inspect.isclass(thing) else thing).parameters.values()
    found = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return found[1:] if inspect.isclass(thing) else found


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _unbound(thing: Any) -> Any:
    while isinstance(thing, functools.partial):
        thing = thing.func
    return thing


def _code_of(thing: Any) -> Any:
    """The code that a call runs: it has the annotations, and tells if it is async or a generator."""
    inner = _unbound(thing)
    return inner if inspect.isroutine(inner) else type(inner).__call__


def _name(thing: Any) -> str:
    return getattr(_unbound(thing), "__qualname__", None) or type(thing).__name__


def declared(thing: Any, family: Family) -> dict[str, Any]:
    """The fields of a ModelSpec that a tensor model, or a loader of one, declares: by annotations, and by attributes of
    these names, which take precedence. Other families have none."""
    if family is not Family.TENSOR:
        return {}
    if not is_loader(thing):
        return _annotated(thing) | _attributes(thing)
    yields = typing.get_args(hints_of(thing.__wrapped__).get("return"))
    return _of_class(next(iter(yields), None)) | _attributes(thing)


def made_declared(factory: Any, family: Family) -> dict[str, Any]:
    """The declaration, as by `declared`, of the model that a class or a factory function makes."""
    return _of_class(_made(factory)) | _attributes(factory) if family is Family.TENSOR else {}


def _of_class(made: Any) -> dict[str, Any]:
    return _annotated(made) | _attributes(made) if inspect.isclass(made) and _is_called(made) else {}


def _made(factory: Any) -> Any:
    return factory if inspect.isclass(factory) else hints_of(factory).get("return")


def _is_called(made: Any) -> bool:
    return inspect.isfunction(getattr(made, "__call__", None))  # noqa: B004  # of a class, its own


def _attributes(thing: Any) -> dict[str, Any]:
    found = {name: getattr(_unbound(thing), name, None) for name in DECLARED}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in found.items()
        if isinstance(value, DECLARED[name])
    }


def _annotated(thing: Any) -> dict[str, Any]:
    """The declaration in the annotations of a callable, or of a class of callables."""
    name, parameters = _name(thing), _by_position(thing)
    fn = thing.__call__ if inspect.isclass(thing) else _code_of(thing)
    hints = hints_of(fn)
    takes = _taken(parameters[0].name, hints)[1] if parameters else Session
    if takes is None and _takes_request(thing, [p.name for p in parameters if p.default is p.empty]):
        takes = InferRequest
    if takes is Session:
        return {}
    found: dict[str, Any] = {} if takes is InferRequest else {"inputs": input_specs(name, parameters, hints)}
    answer = hints.get("return")
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        found["decoupled"] = True
        answer = unaliased(answer)
        answer = next(iter(typing.get_args(answer)), None) if typing.get_origin(answer) in _YIELDS else None
    outputs = output_specs(name, answer)
    return found if outputs is None else {**found, "outputs": outputs}


def made_family(factory: Any) -> Family | None:
    """The family of the model that a class or a factory function makes, by annotations. None if they do not tell."""
    made = _made(factory)
    found = _family_in(made) if _is_called(made) else None
    return found or (Family.TENSOR if is_declared(factory) or is_declared(made) else None)


def partial_loader(loader: Any, options: Mapping[str, Any]) -> Any:
    """An async context manager function with its options bound."""

    @functools.wraps(loader)
    async def bound() -> AsyncGenerator[Any, None]:
        async with loader(**options) as model:
            yield model

    return asynccontextmanager(bound)


def is_loader(thing: Any) -> bool:
    """True for a function or method decorated with asynccontextmanager."""
    return inspect.isroutine(thing) and inspect.isasyncgenfunction(getattr(thing, "__wrapped__", None))


def _loader_family(thing: Any) -> Family:
    found = _family_in(hints_of(thing.__wrapped__).get("return")) or (Family.TENSOR if is_declared(thing) else None)
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
