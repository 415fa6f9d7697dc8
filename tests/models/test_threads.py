"""A call in a thread: what it raises brings no frame along, and says where it was raised."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio

from models.blocking import Raised, caught, detached, in_thread, iterate_steps, run_step
from models.errors import ModelError


def chained(body: Any) -> None:
    try:
        try:
            raise KeyError(len(body))
        except KeyError:
            raise ValueError("hidden") from None
    except ValueError as e:
        raise ModelError("said") from e


def grouped(body: Any) -> None:
    failed = []
    for kind in (KeyError, ValueError):
        try:
            raise kind(len(body))
        except kind as e:
            failed.append(e)
    raise ExceptionGroup("several", failed)


def every(error: BaseException) -> list[BaseException]:
    found, waiting = list[BaseException](), [error]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.append(one)
            waiting += [other for other in (one.__cause__, one.__context__) if other is not None]
            waiting += getattr(one, "exceptions", ())
    return found


async def gone(seen: weakref.ref[Any]) -> None:
    with trio.fail_after(60):
        while seen() is not None:  # noqa: ASYNC110  # the thread tells nobody that it has ended
            await trio.sleep(0.001)


@pytest.mark.parametrize("failing", [chained, grouped])
async def test_an_exception_of_a_thread_keeps_nothing_of_its_call(failing: Callable[[Any], None]) -> None:
    frames, tracebacks = list[str](), list[bool]()

    async def look() -> weakref.ref[Any]:
        body = np.zeros(10)

        def call() -> None:
            failing(body)

        try:
            await in_thread(call)
        except Exception as e:  # pytest.raises would know it
            frames.extend(frame.f_code.co_name for frame, _ in traceback.walk_tb(e.__traceback__))
            tracebacks.extend(bool(other.__traceback__) for other in every(e)[1:])
        return weakref.ref(body)

    gc.disable()
    try:
        seen = await look()
        await gone(seen)
    finally:
        gc.enable()
    assert frames == ["look", "in_thread"], "its own traceback is the caller's"
    assert not any(tracebacks)


async def test_a_bug_says_where_in_its_thread_it_was_raised() -> None:
    with pytest.raises(KeyError) as raised:
        await in_thread(lambda: {}["missing"])
    (note,) = raised.value.__notes__
    assert note.startswith("In its thread:\nTraceback")
    assert 'lambda: {}["missing"]' in note
    assert note in "".join(traceback.format_exception(raised.value))


async def test_what_was_expected_has_no_note() -> None:
    with pytest.raises(ModelError) as raised:
        await run_step(lambda: chained(b""))
    assert not hasattr(raised.value, "__notes__")


def test_an_exception_that_is_raised_again_and_again_has_one_note() -> None:
    always = ValueError("always")
    always.add_note("the author's own")

    def call() -> None:
        raise always

    for _ in range(3):
        found = caught(call)
        assert isinstance(found, Raised)
    own, ours = always.__notes__
    assert own == "the author's own"
    assert ours.count("In its thread:") == 1


def test_an_exception_that_cannot_be_written_is_raised_all_the_same() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def call() -> None:
        raise Unspeakable

    found = caught(call)
    assert isinstance(found, Raised)
    assert type(found.error) is Unspeakable


def test_detached_leaves_the_chain_as_it_is() -> None:
    with pytest.raises(ModelError) as raised:
        chained(b"")
    error = detached(raised.value)
    assert isinstance(error.__cause__, ValueError)
    assert isinstance(error.__cause__.__context__, KeyError)


def test_detached_ends_where_a_chain_does_not() -> None:
    error = KeyError("a")
    error.__cause__ = ValueError("b")
    error.__cause__.__context__ = error
    assert detached(error) is error


async def test_a_generator_that_fails_when_it_is_left_keeps_nothing() -> None:
    gc.disable()
    try:
        body = np.zeros(10)
        seen, over = weakref.ref(body), trio.Event()
        token = trio.lowlevel.current_trio_token()

        def items(body: Any) -> Any:
            try:
                yield 1
            finally:
                token.run_sync_soon(over.set)
                body[10] = 1

        steps = iterate_steps(items(body))
        assert await anext(steps) == 1
        await steps.aclose()
        del steps, body
        with trio.fail_after(60):
            await over.wait()
        await gone(seen)
    finally:
        gc.enable()
