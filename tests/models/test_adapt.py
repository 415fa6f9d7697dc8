"""Everything that may stand for a model: each shape, each family, what may be returned, and what the refusals say to change."""

from __future__ import annotations

import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from models.adapt import adapt, blocking, is_loader, made_family, partial_loader, spec_of
from models.blocking import cancel_token
from models.errors import ModelError
from models.messages import (
    Family,
    Finish,
    FinishReason,
    InferRequest,
    InferResponse,
    Part,
    PartKind,
    Prompt,
    Tensor,
    Token,
)
from models.session import Session
from models.spec import ModelSpec, TensorSpec
from tests.models.channels import MemoryChannel

if TYPE_CHECKING:
    from fractions import Fraction  # for the test of annotations that cannot be resolved

LOOP_THREAD = threading.get_ident()


async def served(thing: Any, *messages: Any, **options: Any) -> list[Any]:
    """Loads whatever stands for a model, calls it once, unloads it, and returns the messages that the client gets."""
    channel = MemoryChannel(*messages)
    async with spec_of(thing, **options).load() as model:
        await model(Session(channel))
    return channel.sent


def tensors(**arrays: Any) -> InferRequest:
    return InferRequest(inputs=tuple(Tensor(name=k, data=np.asarray(v)) for k, v in arrays.items()))


def same_tensors(response: Any, **arrays: Any) -> bool:
    assert isinstance(response, InferResponse)
    return [t.name for t in response.outputs] == list(arrays) and all(
        np.array_equal(t.data, arrays[t.name]) for t in response.outputs
    )


ASK = Prompt(text="a b")
A, B = Token(text="a", id=0), Token(text="b", id=1)


# -- shapes ----------------------------------------------------------------------------------------------------------


async def test_a_function_answers_each_message_from_a_thread() -> None:
    threads: list[int] = []

    def shout(text: str) -> str:
        threads.append(threading.get_ident())
        return text.upper()

    assert await served(shout, ASK, ASK) == [Token(text="A B")] * 2
    assert LOOP_THREAD not in threads


async def test_a_function_that_does_not_block_runs_on_the_event_loop() -> None:
    @blocking(False)
    def here(_: str) -> str:
        return str(threading.get_ident())

    (token,) = await served(here, ASK)
    assert token.text == str(threading.get_ident())


async def test_an_async_function_answers_each_message() -> None:
    async def shout(prompt: Prompt) -> str:
        await trio.lowlevel.checkpoint()
        return prompt.text.upper()

    assert await served(shout, ASK) == [Token(text="A B")]


async def test_a_function_that_returns_nothing_says_nothing() -> None:
    async def deaf(prompt: Prompt) -> None:
        return None

    assert await served(deaf, ASK) == []


async def test_a_generator_takes_one_thread_call_a_step() -> None:
    threads: list[int] = []

    def words(prompt: Prompt) -> Iterator[str]:
        for word in prompt.text.split():
            threads.append(threading.get_ident())
            yield word

    assert await served(words, ASK, ASK) == [A, B, A, B]
    assert len(threads) == 4
    assert LOOP_THREAD not in threads


async def test_a_generator_is_advanced_only_when_its_last_value_has_room() -> None:
    steps: list[str] = []

    def words(text: str) -> Iterator[str]:
        for word in text.split():
            steps.append(word)
            yield word

    for thing in (words, blocking(False)(words)):
        steps.clear()
        channel = MemoryChannel(Prompt(text="a b c"), room=1)
        stuck = trio.Event()
        send = channel.send

        async def watched_send(message: Any, send: Any = send, stuck: trio.Event = stuck, channel: Any = channel) -> None:
            if channel.room < 1:
                stuck.set()
            await send(message)

        channel.send = watched_send  # type: ignore[method-assign]
        async with spec_of(thing).load() as model, trio.open_nursery() as nursery:
            nursery.start_soon(model, Session(channel))
            await stuck.wait()
            await wait_all_tasks_blocked()
            assert steps == ["a", "b"]
            nursery.cancel_scope.cancel()


async def test_a_generator_that_does_not_block_runs_on_the_event_loop_and_is_closed() -> None:
    closed: list[int] = []

    @blocking(False)
    def words(text: str) -> Iterator[str]:
        try:
            yield from text.split()
        finally:
            closed.append(threading.get_ident())

    assert await served(words, ASK) == [A, B]
    with pytest.raises(ZeroDivisionError):
        await refusing(words)
    assert closed == [threading.get_ident()] * 2


async def refusing(thing: Any) -> None:
    """Runs a model over a wire that fails when it answers."""

    class Failing(MemoryChannel):
        async def send(self, message: Any, /) -> None:
            raise ZeroDivisionError

    async with spec_of(thing).load() as model:
        await model(Session(Failing(ASK)))


async def test_a_blocking_generator_is_closed_in_a_thread_when_its_client_leaves() -> None:
    closed_in: list[int] = []
    closed, cancelled = threading.Event(), threading.Event()

    def words(text: str) -> Iterator[str]:
        token = cancel_token()
        try:
            yield text
        finally:
            closed_in.append(threading.get_ident())
            if token.cancelled:
                cancelled.set()
            closed.set()

    with pytest.raises(ZeroDivisionError):
        await refusing(words)
    assert await trio.to_thread.run_sync(closed.wait, 10)
    assert closed_in != [threading.get_ident()]
    assert cancelled.is_set()


async def test_an_async_generator_streams_and_is_closed_when_it_is_cancelled() -> None:
    told: list[str] = []

    async def words(prompt: Prompt) -> AsyncIterator[str]:
        try:
            for word in prompt.text.split():
                yield word
            await trio.sleep_forever()
        finally:
            told.append("closed")

    channel = MemoryChannel(ASK)
    async with spec_of(words).load() as model, trio.open_nursery() as nursery:
        nursery.start_soon(model, Session(channel))
        await wait_all_tasks_blocked()
        assert (channel.sent, told) == ([A, B], [])
        nursery.cancel_scope.cancel()
    assert told == ["closed"]
    with pytest.raises(ZeroDivisionError):
        await refusing(words)
    assert told == ["closed"] * 2


async def test_a_function_of_a_session_is_the_model_itself() -> None:
    async def duplex(session: Session[Part, Part]) -> None:
        async for part in session:
            await session.send(part)

    model, family = adapt(duplex)
    assert model is duplex
    assert family is Family.PARTS
    assert await served(duplex, Part(data=b"x")) == [Part(data=b"x")]


async def test_an_object_that_is_called_is_a_model_of_each_shape() -> None:
    class Doubler:
        def __init__(self, times: int) -> None:
            self.times = times

        @blocking(False)
        def __call__(self, text: str) -> str:
            return text * self.times

    class Streamer:
        async def __call__(self, text: str) -> AsyncIterator[str]:
            for word in text.split():
                yield word

    class Duplex:
        async def __call__(self, session: Session[Prompt, Token]) -> None:
            async for prompt in session:
                await session.send(Token(text=prompt.text))

    assert await served(Doubler(2), ASK) == [Token(text="a ba b")]
    assert await served(Streamer(), ASK) == [A, B]
    assert await served(Duplex(), ASK) == [Token(text="a b")]
    assert spec_of(Doubler(2)).name == "Doubler"


async def test_a_method_and_a_partial_are_models_too() -> None:
    class Shop:
        def say(self, text: str) -> str:
            return text + "!"

    def words(suffix: str, prompt: Prompt, *, upper: bool) -> Iterator[str]:
        for word in prompt.text.split():
            yield (word.upper() if upper else word) + suffix

    assert await served(Shop().say, ASK) == [Token(text="a b!")]
    bound = functools.partial(functools.partial(words, "!"), upper=True)
    assert await served(bound, ASK) == [Token(text="A!"), Token(text="B!", id=1)]
    assert spec_of(bound).name == "words"


async def test_a_loader_yields_the_model_and_unloads_after_it() -> None:
    told: list[str] = []

    @asynccontextmanager
    async def load() -> AsyncIterator[Callable[[Session[Part, Part]], Awaitable[None]]]:
        told.append("load")

        async def echo(session: Session[Part, Part]) -> None:
            async for part in session:
                told.append("call")
                await session.send(part)

        yield echo
        told.append("unload")

    spec = spec_of(load)
    assert (spec.family, spec.name) == (Family.PARTS, "load")
    assert await served(load, Part(data=b"x")) == [Part(data=b"x")]
    assert await served(load) == []
    assert told == ["load", "call", "unload", "load", "unload"]


class Upper:
    def __call__(self, text: str) -> str:
        return text.upper()


class Plain:
    def __call__(self, x):  # type: ignore[no-untyped-def]
        return x


class Loud(Upper):
    """Called as its base is."""


@asynccontextmanager
async def loads_upper() -> AsyncIterator[Loud]:
    yield Loud()


@asynccontextmanager
async def loads_a_generator() -> AsyncIterator[Callable[[str], Iterator[str]]]:
    def words(text: str) -> Iterator[str]:
        yield from text.split()

    yield words


@asynccontextmanager
async def loads_something():  # type: ignore[no-untyped-def]
    yield Upper()


async def test_a_loader_tells_its_family_by_what_it_yields() -> None:
    assert await served(loads_upper, ASK) == [Token(text="A B")]
    assert await served(loads_a_generator, ASK) == [A, B]
    assert await served(loads_something, ASK, family=Family.TEXT) == [Token(text="A B")]
    with pytest.raises(TypeError, match=r"loads_something: say what it yields, such as AsyncIterator\[.*or give family="):
        spec_of(loads_something)


async def test_a_loader_may_be_a_method() -> None:
    class Shop:
        open = False

        @asynccontextmanager
        async def load(self) -> AsyncIterator[Upper]:
            self.open = True
            yield Upper()
            self.open = False

    shop = Shop()
    assert is_loader(shop.load)
    async with spec_of(shop.load).load() as model:
        assert shop.open
        channel = MemoryChannel(ASK)
        await model(Session(channel))
    assert channel.sent == [Token(text="A B")]
    assert not shop.open


async def test_a_loader_with_options_bound_is_a_loader_that_can_be_entered_again() -> None:
    @asynccontextmanager
    async def load(suffix: str) -> AsyncIterator[Upper]:
        class Suffixed(Upper):
            def __call__(self, text: str) -> str:
                return text + suffix

        yield Suffixed()

    bound = partial_loader(load, {"suffix": "?"})
    for _ in range(2):
        assert await served(bound, ASK) == [Token(text="a b?")]


async def test_what_a_loader_yields_must_be_a_model() -> None:
    @asynccontextmanager
    async def load() -> AsyncIterator[Upper]:
        yield 5  # type: ignore[misc]

    with pytest.raises(TypeError, match="5 is no model: give a function, a generator, or an object with __call__"):
        await served(load)


def test_a_class_or_a_factory_tells_the_family_of_what_it_makes() -> None:
    def makes_upper() -> Upper:
        return Upper()

    def answers() -> str:
        return ""

    assert made_family(Loud) is Family.TEXT
    assert made_family(makes_upper) is Family.TEXT
    assert made_family(Plain) is None
    assert made_family(object) is None
    assert made_family(answers) is None, "a function that gives text is no factory of models"


# -- specs -----------------------------------------------------------------------------------------------------------


def test_a_spec_passes_through_and_takes_overrides_even_of_nothing() -> None:
    spec = spec_of(Upper(), "upper", capacity=3, timeout=5.0, queue=7)
    assert spec_of(spec) == spec
    renamed = spec_of(spec, "other", timeout=0.0, queue=0)
    assert (renamed.name, renamed.timeout, renamed.queue, renamed.capacity) == ("other", 0.0, 0, 3)
    assert renamed.load is spec.load


def test_overrides_become_fields_of_the_spec() -> None:
    spec = spec_of(loads_upper, "upper", capacity=3, version="2")
    assert isinstance(spec, ModelSpec)
    assert (spec.name, spec.family, spec.capacity, spec.version) == ("upper", Family.TEXT, 3, "2")


def test_tensors_that_an_object_declares_are_in_its_spec() -> None:
    class Adder:
        inputs = [TensorSpec(name="A", datatype="FP32", shape=(-1,))]  # noqa: RUF012
        outputs = (TensorSpec(name="OUTPUT0", datatype="FP32", shape=(-1,)),)

        def __call__(self, A: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return A

    spec = spec_of(Adder())
    assert (spec.inputs, spec.outputs) == (tuple(Adder.inputs), Adder.outputs)
    assert spec_of(Adder(), inputs=None).inputs is None
    assert spec_of(Upper()).inputs is None


@pytest.mark.parametrize(("field", "value"), [("capacity", 0), ("name", "")])
def test_a_spec_that_cannot_serve_is_a_value_error(field: str, value: Any) -> None:
    fields = {"name": "m", "family": Family.TEXT, "load": loads_upper, field: value}
    with pytest.raises(ValueError, match=field):
        ModelSpec(**fields)


@pytest.mark.parametrize("error", [trio.EndOfChannel(), StopAsyncIteration(), ModelError("no")])
async def test_what_a_function_raises_comes_out_and_ends_its_session(error: Exception) -> None:
    async def model(prompt: Prompt) -> str:
        raise error

    channel = MemoryChannel(ASK, ASK)
    with pytest.raises(type(error)) as caught:
        await adapt(model)[0](Session(channel))
    assert caught.value is error
    assert await channel.receive() == ASK, "the next message stays with the client"


# -- families and what may be returned -------------------------------------------------------------------------------

ROW = np.arange(3, dtype=np.float32)


@pytest.mark.parametrize(
    ("takes", "given"),
    [(Prompt, ASK), (str, "a b"), (InferRequest, None), (Part, Part(data=b"x")), (bytes, b"x")],
)
async def test_a_function_is_given_the_message_as_it_is_annotated(takes: type, given: Any) -> None:
    seen: list[Any] = []

    async def model(message: Any) -> None:
        seen.append(message)

    model.__annotations__["message"] = takes
    message = {Family.TEXT: ASK, Family.TENSOR: tensors(x=ROW), Family.PARTS: Part(data=b"x")}[spec_of(model).family]
    await served(model, message)
    assert seen == [given if given is not None else message]


async def test_bytes_are_given_as_bytes_also_where_the_wire_has_a_view() -> None:
    seen: list[Any] = []

    async def model(data: bytes) -> None:
        seen.append(type(data))

    await served(model, Part(data=memoryview(b"x")))
    assert seen == [bytes]


@pytest.mark.parametrize(
    ("returned", "sent"),
    [
        ("text", Token(text="text")),
        (Token(text="t", id=9), Token(text="t", id=9)),
        (Finish(reason=FinishReason.LENGTH), Finish(reason=FinishReason.LENGTH)),
    ],
)
async def test_a_text_function_returns_text_tokens_or_the_end(returned: Any, sent: Any) -> None:
    async def model(prompt: Prompt) -> Any:
        return returned

    assert await served(model, ASK) == [sent]


async def test_tokens_of_a_generator_are_numbered_anew_for_each_prompt() -> None:
    async def words(prompt: Prompt) -> AsyncIterator[str | Token]:
        yield "a"
        yield Token(text="given", id=7)
        yield "b"

    once = [A, Token(text="given", id=7), B]
    assert await served(words, ASK, ASK) == once * 2


@pytest.mark.parametrize("data", [b"x", bytearray(b"x"), memoryview(b"x")])
async def test_a_function_of_parts_returns_bytes_of_any_kind(data: Any) -> None:
    async def model(_: bytes) -> Any:
        return data

    assert await served(model, Part(data=b"")) == [Part(data=data)]


async def test_a_function_of_parts_returns_parts_or_text() -> None:
    async def model(_: Part) -> AsyncIterator[Any]:
        yield "ü"
        yield Part(data=b"x", last=False)

    assert await served(model, Part(data=b"")) == [Part(data="ü".encode(), kind=PartKind.UTF8), Part(data=b"x", last=False)]


async def test_a_function_of_arrays_is_given_them_by_name_in_any_order() -> None:
    def subtract(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> dict[str, Any]:
        return {"difference": first - second}

    def by_position(first: np.ndarray, second: Any, /) -> dict[str, Any]:
        return subtract(first, second)

    for model in (subtract, by_position):
        (response,) = await served(model, tensors(second=ROW, first=ROW * 3))
        assert same_tensors(response, difference=ROW * 2)


async def test_names_stand_for_arrays_where_only_the_family_says_so() -> None:
    async def model(x, y):  # type: ignore[no-untyped-def]
        return x + y

    (response,) = await served(model, tensors(y=ROW, x=ROW), family=Family.TENSOR)
    assert same_tensors(response, OUTPUT0=ROW * 2)


@pytest.mark.parametrize("names", [["first"], ["first", "third"], ["first", "second", "third"], []])
async def test_inputs_that_are_missing_or_unknown_are_the_clients_mistake(names: list[str]) -> None:
    async def model(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> None:
        pytest.fail("called")

    with pytest.raises(ModelError) as caught:
        await served(model, tensors(**dict.fromkeys(names, ROW)))
    assert (caught.value.status, caught.value.code) == (400, "BadInputs")
    assert caught.value.message == f"expected inputs first, second; got {', '.join(names) or 'none'}"


async def test_a_refusal_does_not_repeat_endless_names() -> None:
    async def model(first: npt.NDArray[Any]) -> None:
        pytest.fail("called")

    with pytest.raises(ModelError) as caught:
        await served(model, tensors(**{"x" * 5000: ROW}))
    assert len(caught.value.message) == 200


@pytest.mark.parametrize(
    ("returned", "datatype", "data"),
    [
        (ROW, "FP32", ROW),
        (np.array([True]), "BOOL", np.array([True])),
        (ROW.astype(ml_dtypes.bfloat16), "BF16", ROW.astype(ml_dtypes.bfloat16)),
        (np.array(["ü", "abc"]), "BYTES", np.array(["ü".encode(), b"abc"], dtype=object)),
        (np.array([b"x"]), "BYTES", np.array([b"x"], dtype=object)),
        (np.array([b"x\0", b""], dtype=object), "BYTES", np.array([b"x\0", b""], dtype=object)),
    ],
)
async def test_an_array_that_is_returned_is_output0_in_the_form_of_its_datatype(
    returned: Any, datatype: str, data: Any
) -> None:
    async def model(x: npt.NDArray[Any]) -> Any:
        return returned

    (response,) = await served(model, tensors(x=ROW))
    assert same_tensors(response, OUTPUT0=data)
    (output,) = response.outputs
    assert (output.datatype, output.data.dtype) == (datatype, data.dtype)


async def test_a_dict_names_the_outputs_and_a_response_is_sent_as_it_is() -> None:
    answer = InferResponse(outputs=())

    async def model(request: InferRequest) -> AsyncIterator[Any]:
        yield {"list": [1, 2], "one": 1.5, "text": ["a"], "none": []}
        yield answer

    first, second = await served(model, tensors(x=ROW))
    assert same_tensors(first, list=[1, 2], one=1.5, text=[b"a"], none=[])
    assert [t.datatype for t in first.outputs] == ["INT64", "FP64", "BYTES", "FP64"]
    assert second is answer


@pytest.mark.parametrize(
    ("takes", "message", "answer", "text"),
    [
        (
            str,
            ASK,
            b"x",
            "a text model answers with str, Token, ToolCall or Finish, and a generator yields them; this one gave bytes",
        ),
        (bytes, Part(data=b""), 5, "a parts model answers with Part, bytes or str.* gave int"),
        (
            InferRequest,
            tensors(),
            [1],
            "a tensor model answers with InferResponse, a numpy array, a number, or a dict or NamedTuple of arrays.* gave list",
        ),
        (InferRequest, tensors(), np.array([1j]), "complex128: cast to"),
    ],
)
async def test_an_answer_of_another_family_is_told_what_to_return(takes: Any, message: Any, answer: Any, text: str) -> None:
    async def model(message: Any) -> Any:
        return answer

    model.__annotations__["message"] = takes
    with pytest.raises(TypeError, match=text):
        await served(model, message)


# -- objects that are no models ---------------------------------------------------------------------------------------


def nothing() -> None: ...
def untyped(x): ...  # type: ignore[no-untyped-def]
def of_lists(x: list[str]) -> None: ...
def of_session(session: Session[Prompt, Token]) -> None: ...
async def of_any(session: Session[Any, Any]) -> None: ...
async def of_session_by_name(session): ...  # type: ignore[no-untyped-def]
async def of_session_and(session: Session[Prompt, Token], more: int) -> None: ...
def of_two(text: str, limit: int) -> None: ...
def of_named(text: str, *, limit: int) -> None: ...
def of_fraction(x: Fraction) -> None: ...
async def streams(session: Session[Prompt, Token]) -> AsyncIterator[str]:
    yield ""


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (5, "5 is no model: give a function, a generator, or an object with __call__"),
        (Upper, "Upper.* is no model"),
        (nothing, "nothing has no argument that must be given: a model takes a Session, one message, or arrays of which one has"),
        (untyped, "untyped: annotate 'x' with Prompt, str, InferRequest, numpy.ndarray, Part, bytes or Session, or give family="),
        (Plain(), "annotate 'x'"),
        (of_lists, "of_lists: annotate 'x'"),
        (of_session, "of_session takes a Session, so it must be an async function"),
        (streams, "streams takes a Session, so it must be an async function"),
        (of_any, r"of_any: say which messages it speaks, such as Session\[Prompt, Token\] or family="),
        (of_session_by_name, "of_session_by_name: say which messages it speaks"),
        (of_session_and, "of_session_and: a model takes a Session alone; give more a default"),
        (of_two, "of_two: a model takes one message; give limit a default"),
        (of_named, "of_named: arguments are given by position; give limit a default"),
        (of_fraction, "of_fraction: an annotation cannot be resolved: name 'Fraction' is not defined; import it at run time"),
        (functools.partial(of_two), "of_two: a model takes one message"),
        (max, "max does not tell its parameters: wrap it in a function that does"),
    ],
)  # fmt: skip
def test_what_is_no_model_is_told_what_to_change(thing: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        spec_of(thing)


@pytest.mark.parametrize(
    ("thing", "family"), [(Upper(), Family.PARTS), (Upper(), Family.TENSOR), (of_session_and, Family.PARTS)]
)
def test_a_family_that_contradicts_the_annotation_is_refused(thing: Any, family: Family) -> None:
    with pytest.raises(TypeError, match=f"its annotation says text and family= says {family.value}; change one of them"):
        spec_of(thing, family=family)


@pytest.mark.parametrize("thing", [of_any, of_session_by_name, untyped, Plain()])
def test_a_family_can_be_given_where_the_annotation_is_silent(thing: Any) -> None:
    assert spec_of(thing, family=Family.PARTS).family is Family.PARTS


def test_a_representation_that_is_long_is_not_repeated_whole() -> None:
    with pytest.raises(TypeError) as caught:
        spec_of("x" * 5000)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("kind", ["async", "sync", "texts"])
async def test_what_a_channel_sends_at_once_is_not_sent_again(kind: str) -> None:
    class Quick(MemoryChannel):
        def try_send(self, message: object) -> bool:
            if type(message) is not Token or len(self.sent) % 2:
                return False
            self.sent.append(message)
            return True

    async def several(prompt: Prompt) -> AsyncIterator[Token]:
        for i in range(5):
            yield Token(text="t", id=i)

    @blocking(False)
    def steps(prompt: Prompt) -> Iterator[Token]:
        for i in range(5):
            yield Token(text="t", id=i)

    async def texts(prompt: Prompt) -> AsyncIterator[str]:
        for _ in range(5):
            yield "t"

    model, _ = adapt({"async": several, "sync": steps, "texts": texts}[kind])
    channel = Quick(Prompt(text="x"))
    await model(Session(channel))
    assert [token.id for token in channel.sent] == [0, 1, 2, 3, 4]
