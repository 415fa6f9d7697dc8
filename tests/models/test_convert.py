"""Converters: models of parts on text wires, models of text on part wires, and what is lost on the way: nothing."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from models.adapt import adapt, blocking
from models.convert import convert, convertible
from models.errors import ModelError
from models.library.echo import Echo
from models.messages import (
    Family,
    Finish,
    FinishReason,
    GenerationParameters,
    InferRequest,
    Part,
    PartKind,
    Prompt,
    Token,
)
from models.session import Call, Session
from tests.models.channels import MemoryChannel

MiB = 1024 * 1024
Model = Callable[[Session[Any, Any]], Awaitable[None]]
END = Part(data=b"", kind=PartKind.UTF8)


def utf8(text: str, *, last: bool = True) -> Part:
    return Part(data=text.encode(), kind=PartKind.UTF8, last=last)


async def on_text_wire(model: Model, *prompts: str) -> list[Any]:
    """Returns the messages that a text client gets from a model of parts."""
    channel = MemoryChannel(*(Prompt(text=p) for p in prompts))
    await convert(model, Family.PARTS, Family.TEXT)(Session(channel))
    return channel.sent


async def on_parts_wire(model: Model, *parts: Part, **options: Any) -> list[Part]:
    """Returns the parts that a client of parts gets from a model of text."""
    channel = MemoryChannel(*parts)
    await convert(model, Family.TEXT, Family.PARTS, **options)(Session(channel))
    return channel.sent


def sending(*parts: Part) -> Model:
    """A model of parts that answers with these, whatever it is asked."""

    async def model(session: Session[Part, Part]) -> None:
        for part in parts:
            await session.send(part)

    return model


def bytes_of(*pieces: bytes) -> Iterable[Part]:
    return (Part(data=piece) for piece in pieces)


def speaking(*messages: Token | Finish) -> Model:
    """A model of text that answers each prompt with these messages."""

    async def model(session: Session[Prompt, Any]) -> None:
        async for _ in session:
            for message in messages:
                await session.send(message)

    return model


@blocking(False)
def words(prompt: str) -> Any:
    yield from prompt.split()


WORDS, _ = adapt(words)


# -- which families convert ------------------------------------------------------------------------------------------


def test_text_and_parts_convert_to_one_another_and_tensors_to_nothing() -> None:
    pairs = {(a, b) for a in Family for b in Family if convertible(a, b)}
    assert pairs == {*((f, f) for f in Family), (Family.TEXT, Family.PARTS), (Family.PARTS, Family.TEXT)}


@pytest.mark.parametrize("family", Family)
def test_a_model_of_the_wires_own_family_is_not_wrapped(family: Family) -> None:
    model = Echo()
    assert convert(model, family, family) is model


@pytest.mark.parametrize("other", [Family.TEXT, Family.PARTS])
def test_families_that_do_not_convert_are_a_type_error_that_names_both(other: Family) -> None:
    for model, wire in ((Family.TENSOR, other), (other, Family.TENSOR)):
        with pytest.raises(TypeError, match=f"a {model.value} model cannot answer {wire.value} calls"):
            convert(Echo(), model, wire)


# -- parts on a text wire --------------------------------------------------------------------------------------------


async def test_a_prompt_is_one_utf8_part_and_then_the_end() -> None:
    got: list[Any] = []

    async def model(session: Session[Part, Part]) -> None:
        got.extend([part async for part in session])

    await on_text_wire(model, "Zürich")
    assert got == [utf8("Zürich")]


async def test_each_part_that_comes_back_is_a_token_numbered_in_order() -> None:
    got = await on_text_wire(sending(utf8("a"), Part(data=memoryview(b"b"), last=False), utf8("")))
    assert got == [Token(text="a", id=0), Token(text="b", id=1), Token(text="", id=2)]


async def test_the_model_sees_the_call_and_the_deadline_of_its_client() -> None:
    seen: list[Any] = []

    async def model(session: Session[Any, Any]) -> None:
        seen.append((session.call, session.deadline))
        await session.receive()

    call = Call(id="x")
    await convert(model, Family.PARTS, Family.TEXT)(Session(MemoryChannel(Prompt(text="p")), call, deadline=5.0))
    await convert(model, Family.TEXT, Family.PARTS)(Session(MemoryChannel(utf8("p")), call, deadline=5.0))
    assert seen == [(call, 5.0)] * 2


@given(st.text(), st.lists(st.integers(0, 80)))
@settings(max_examples=60)
def test_text_comes_out_whole_wherever_its_bytes_are_cut_into_parts(text: str, cuts: list[int]) -> None:
    data = text.encode()
    at = [0, *sorted(c for c in cuts if c < len(data)), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(at)]
    got = trio.run(on_text_wire, sending(*bytes_of(*pieces)))
    assert "".join(token.text for token in got) == text
    assert len(got) == len(pieces)


@given(st.lists(st.binary(max_size=6), max_size=6))
@settings(max_examples=60)
def test_bytes_that_are_no_text_become_replacement_characters(pieces: list[bytes]) -> None:
    got = trio.run(on_text_wire, sending(*bytes_of(*pieces)))
    assert "".join(token.text for token in got) == b"".join(pieces).decode(errors="replace")


async def test_a_character_that_is_never_completed_is_told_at_the_end() -> None:
    got = await on_text_wire(sending(*bytes_of(b"a\xe2\x82")))
    assert [token.text for token in got] == ["a", "\ufffd"]


async def test_the_end_after_a_complete_answer_is_no_error() -> None:
    channel = MemoryChannel(Prompt(text=""))

    async def model(session: Session[Part, Part]) -> None:
        await session.send(Part(data=b"a\xe2"))
        channel.complete = True

    await convert(model, Family.PARTS, Family.TEXT)(Session(channel))
    assert [token.text for token in channel.sent] == ["a"]


async def test_a_cancelled_send_forgets_the_bytes_that_it_decoded() -> None:
    channel = MemoryChannel(Prompt(text=""), room=1)

    async def model(session: Session[Part, Part]) -> None:
        await session.send(Part(data=b"\xe2"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.send, Part(data=b"\x82\xac lost"))
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        channel.read()
        await session.send(Part(data=b"\x82\xac"))

    await convert(model, Family.PARTS, Family.TEXT)(Session(channel))
    assert channel.sent == [Token(text="", id=0), Token(text="€", id=1)]


async def test_a_model_of_parts_that_reads_past_the_end_of_input_ends_well() -> None:
    async def model(session: Session[Part, Part]) -> None:
        while True:
            await session.send(await session.receive())

    assert [token.text for token in await on_text_wire(model, "one", "two")] == ["one", "two"]


@pytest.mark.parametrize("error", [ModelError("no"), ZeroDivisionError(), trio.ClosedResourceError()])
async def test_what_a_model_of_parts_raises_comes_out_as_it_is(error: Exception) -> None:
    async def model(_: Session[Any, Any]) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await on_text_wire(model, "one")
    assert caught.value is error


async def test_a_model_of_parts_that_sends_something_else_is_told_what_to_send() -> None:
    with pytest.raises(TypeError, match="answers with Part, not Token"):
        await on_text_wire(sending(Token(text="a")))  # type: ignore[arg-type]


async def test_a_lone_surrogate_in_a_prompt_reaches_a_model_that_does_not_look_at_text() -> None:
    got: list[Any] = []

    async def model(session: Session[Part, Part]) -> None:
        got.extend([part.data async for part in session])

    await on_text_wire(model, "\ud800")
    assert got == [b"\xed\xa0\x80"]


# -- text on a wire of parts -----------------------------------------------------------------------------------------


async def test_half_a_character_is_a_replacement_character_in_a_part() -> None:
    async def broken(session: Session[Prompt, Token]) -> None:
        await session.receive()
        await session.send(Token(text="a\ud800b"))

    (part, _) = await on_parts_wire(broken, Part(data=b"x"))
    assert part.data == "a\ufffdb".encode()


async def test_each_whole_message_is_a_prompt_and_an_empty_part_closes_each_answer() -> None:
    got = await on_parts_wire(WORDS, utf8("a b"), Part(data=b"c"))
    assert got == [utf8("a"), utf8("b"), END, utf8("c"), END]


async def test_fragments_are_joined_even_inside_a_character() -> None:
    euro = "€".encode()
    got = await on_parts_wire(WORDS, *(Part(data=euro[i : i + 1], last=i == 2) for i in range(3)))
    assert got == [utf8("€"), END]


async def test_every_answer_is_closed_before_the_next_prompt_is_read() -> None:
    channel = MemoryChannel(utf8("a"), utf8("b"), room=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(convert(WORDS, Family.TEXT, Family.PARTS), Session(channel))
        await wait_all_tasks_blocked()
        assert channel.sent == [utf8("a")]
        assert len(channel._inbox) == 1, "the second prompt stays with the client"
        channel.read()
    assert channel.sent == [utf8("a"), END, utf8("b"), END]


async def test_tokens_without_text_leave_nothing_that_would_read_as_the_end_of_the_answer() -> None:
    model = speaking(
        Token(text="the prompt", prefill=True),
        Token(text=""),
        Token(text="a"),
        Token(text="", special=True),
        Finish(reason=FinishReason.EOS_TOKEN),
    )
    assert await on_parts_wire(model, utf8("p")) == [utf8("a"), END]


async def test_a_prompt_of_a_mebibyte_is_read_and_one_byte_more_is_refused() -> None:
    lengths: list[int] = []

    async def model(session: Session[Prompt, Any]) -> None:
        async for prompt in session:
            lengths.append(len(prompt.text))

    half = Part(data=b"x" * (MiB // 2), last=False)
    await on_parts_wire(model, half, Part(data=b"x" * (MiB // 2)))
    assert lengths == [MiB]
    with pytest.raises(ModelError, match=f"at most {MiB} bytes") as caught:
        await on_parts_wire(model, half, half, Part(data=b"x"))
    assert (caught.value.status, caught.value.code) == (413, "PromptTooLarge")
    assert lengths == [MiB]


async def test_a_prompt_that_the_input_ends_in_is_refused() -> None:
    with pytest.raises(ModelError, match="inside a prompt, after 3 bytes") as caught:
        await on_parts_wire(WORDS, utf8("abc", last=False))
    assert caught.value.status == 400


async def test_no_prompt_is_no_answer() -> None:
    assert await on_parts_wire(WORDS) == []
    assert await on_parts_wire(WORDS, Part(data=b"", last=False)) == []


async def test_a_prompt_that_is_no_text_is_refused_without_repeating_it() -> None:
    with pytest.raises(ModelError, match="a prompt is UTF-8 text: invalid start byte at byte 1") as caught:
        await on_parts_wire(WORDS, Part(data=b"a\xff" + b"secret"))
    assert caught.value.status == 400
    assert "secret" not in caught.value.message


async def test_prompts_are_read_as_the_wire_says() -> None:
    def read(data: bytes) -> Prompt:
        return Prompt(text=data.decode().upper())

    assert await on_parts_wire(WORDS, utf8("a"), read_prompt=read) == [utf8("A"), END]


async def test_the_number_of_tokens_asked_for_ends_the_answer() -> None:
    def read(data: bytes) -> Prompt:
        return Prompt(text=data.decode(), parameters=GenerationParameters(max_new_tokens=2))

    assert await on_parts_wire(WORDS, utf8("a b c d"), utf8("e"), read_prompt=read) == [
        utf8("a"), utf8("b"), END, utf8("e"), END,
    ]  # fmt: skip


@pytest.mark.parametrize("last", [Finish(reason=FinishReason.STOP_SEQUENCE), Token(text="z", finish=FinishReason.EOS_TOKEN)])
async def test_a_model_that_goes_on_after_its_last_message_is_stopped_and_its_answer_stands(last: Token | Finish) -> None:
    async def model(session: Session[Prompt, Any]) -> None:
        async with trio.open_nursery() as nursery:  # which wraps what it raises

            async def answer() -> None:
                async for _ in session:
                    for message in (Token(text="a"), last, Token(text="b"), Token(text="c")):
                        await session.send(message)

            nursery.start_soon(answer)

    said = [utf8("a"), *([utf8("z")] if isinstance(last, Token) else []), END]
    assert await on_parts_wire(model, utf8("p"), utf8("q")) == said * 2


@pytest.mark.parametrize("wrapped", [False, True])
async def test_a_model_of_text_that_asks_for_another_prompt_is_given_it_in_its_next_call(wrapped: bool) -> None:
    async def answer(session: Session[Prompt, Any]) -> None:
        while True:
            prompt = await session.receive()
            await session.send(Token(text=prompt.text))

    async def in_a_nursery(session: Session[Prompt, Any]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer, session)

    got = await on_parts_wire(in_a_nursery if wrapped else answer, utf8("a"), utf8("b"))
    assert got == [utf8("a"), END, utf8("b"), END]


async def test_a_model_that_returns_without_taking_the_prompt_ends_the_session() -> None:
    calls = 0

    async def model(_: Session[Any, Any]) -> None:
        nonlocal calls
        calls += 1

    assert await on_parts_wire(model, utf8("a"), utf8("b")) == []
    assert calls == 1


@pytest.mark.parametrize("error", [ModelError("no"), ZeroDivisionError(), trio.ClosedResourceError()])
async def test_what_a_model_of_text_raises_ends_the_session_as_it_is(error: Exception) -> None:
    async def model(session: Session[Any, Any]) -> None:
        await session.receive()
        raise error

    with pytest.raises(type(error)) as caught:
        await on_parts_wire(model, utf8("a"), utf8("b"))
    assert caught.value is error


async def test_an_error_beside_the_end_of_the_answer_is_not_hidden_by_it() -> None:
    async def model(session: Session[Any, Any]) -> None:
        await session.receive()
        raise ExceptionGroup("both", [trio.EndOfChannel(), ZeroDivisionError()])

    with pytest.raises(ExceptionGroup):
        await on_parts_wire(model, utf8("a"))


async def test_a_model_of_text_that_sends_something_else_is_told_what_to_send() -> None:
    with pytest.raises(TypeError, match="answered with Token, ToolCall and Finish, not InferRequest"):
        await on_parts_wire(speaking(InferRequest(inputs=())), utf8("p"))  # type: ignore[arg-type]


async def test_a_cancelled_token_is_not_counted() -> None:
    channel = MemoryChannel(utf8("p"), room=0)

    def read(data: bytes) -> Prompt:
        return Prompt(text="", parameters=GenerationParameters(max_new_tokens=1))

    async def model(session: Session[Prompt, Any]) -> None:
        await session.receive()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.send, Token(text="lost"))
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        channel.read()
        await session.send(Token(text="kept"))

    await convert(model, Family.TEXT, Family.PARTS, read_prompt=read)(Session(channel))
    assert channel.sent == [utf8("kept"), END]


@pytest.mark.parametrize("message", [Token(text="", prefill=True), Token(text=""), Finish(reason=FinishReason.LENGTH)])
async def test_sending_a_message_that_leaves_nothing_still_meets_cancellation(message: Token | Finish) -> None:
    async def model(session: Session[Prompt, Any]) -> None:
        await session.receive()
        with trio.CancelScope() as scope:
            scope.cancel()
            await session.send(message)
        assert scope.cancelled_caught
        await session.send(Token(text="still open"))

    assert await on_parts_wire(model, utf8("p")) == [utf8("still open"), END]


async def test_a_whole_round_of_both_converters_is_an_echo() -> None:
    text = convert(Echo(), Family.PARTS, Family.TEXT)
    assert await on_parts_wire(text, utf8("a"), utf8("b")) == [utf8("a"), END, utf8("b"), END]
