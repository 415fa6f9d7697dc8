"""A traceback begins with the lines of the model's author, and has one line for the frames of everywire: in the log and the
incidents, through threads, batches, chains, groups and processes."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import trio
from numpy.typing import NDArray

from gateway.config.text import text_without_secrets
from gateway.instances.instance import InstanceEnded, RaisedThere, _raise
from gateway.instances.messages import Ended
from gateway.telemetry.logging_setup import JSONFormatter, TextFormatter
from gateway.testing import memory_gateway
from models.adapt import spec_of
from models.messages import Prompt
from models.spec import Batching
from tests.gateway.operator.operators import Operator
from tests.gateway.operator.test_operator import NO_PORT

ERROR = {"name": "gateway", "levelno": logging.ERROR, "levelname": "ERROR"}
X = {"x": np.zeros((1, 4), np.int32)}
FRAME = re.compile(r'File "([^"]+)", line \d+, in (\w+)')


def helper(x: NDArray[np.int32]) -> NDArray[np.int32]:
    raise ZeroDivisionError(f"rows: {len(x)}")


def plain(x: NDArray[np.int32]) -> NDArray[np.int32]:
    return helper(x)


def chained(x: NDArray[np.int32]) -> NDArray[np.int32]:
    try:
        return helper(x)
    except ZeroDivisionError as e:
        raise RuntimeError("no rows") from e


async def grouped(prompt: Prompt) -> AsyncIterator[str]:
    yield "a"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fails, "one")
        nursery.start_soon(fails, "two")


def recursive(prompt: Prompt) -> str:
    return endless(0)


def endless(n: int) -> str:
    return endless(n + 1)


def answers_wrongly(prompt: Prompt) -> Iterator[str]:
    yield 3  # type: ignore[misc]


async def fails(text: str) -> None:
    raise ValueError(text)


def stepped(prompt: Prompt) -> Iterator[str]:
    yield "a"
    raise ValueError("in a step")


class Lines(logging.Handler):
    """The tracebacks of the lines "model raised", as a log has them: an exception loses its own soon after."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == "model raised":
            self.texts.append(TextFormatter().format(record).partition("\n")[2])


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, log = Lines(), logging.getLogger("gateway.worker")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def functions(text: str) -> list[str]:
    """The functions of the frames that a traceback shows; each must be of this file."""
    assert {file for file, _ in FRAME.findall(text)} == {__file__}
    return [name for _, name in FRAME.findall(text)]


async def traced(model: Any, lines: Lines, clients: int = 1, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Calls a model that fails: what its log has, and its incident."""
    spec = spec_of(model, "m", **fields)
    async with memory_gateway([spec], NO_PORT) as house:
        operator = Operator(house.gateway)
        async with trio.open_nursery() as nursery:
            for _ in range(clients):
                if spec.family.value == "tensor":
                    nursery.start_soon(house.client().infer, X, "m")
                else:
                    nursery.start_soon(house.client().lmi, "x", "m")
        (group,) = (await operator.get("/incidents"))["incidents"]
        return lines.texts[0], await operator.get(f"/incidents/{group['id']}")


@pytest.mark.parametrize("clients", [1, 2])
async def test_a_batched_function_that_raises_shows_its_lines(clients: int, lines: Lines, autojump_clock: Any) -> None:
    batching = Batching(max_delay=0.1, retry=False)
    text, incident = await traced(plain, lines, clients, max_batch_size=8, batching=batching)
    for told in (text, incident["traceback"]):
        assert functions(told) == ["plain", "helper"]
        assert "return helper(x)" in told
        assert re.search(r"^ *\.\.\. called by \d+ frames of everywire$", told, re.MULTILINE)
    assert incident["place"] == f"{__file__}:{helper.__code__.co_firstlineno + 1} in helper"
    assert "ZeroDivisionError: rows: " in incident["error"]


@pytest.mark.parametrize(
    ("model", "frames"),
    [
        (plain, ["plain", "helper"]),
        (chained, ["chained", "helper", "chained"]),
        (stepped, ["stepped"]),
        (answers_wrongly, ["answers_wrongly"]),
        (recursive, ["recursive", *["endless"] * 3]),
        (grouped, ["grouped", "fails", "fails"]),
    ],
)
async def test_the_frames_of_a_traceback_are_the_authors(
    model: Any, frames: list[str], lines: Lines, autojump_clock: Any
) -> None:
    text, incident = await traced(model, lines)
    assert functions(text) == frames
    assert functions(incident["traceback"]) == frames[-len(functions(incident["traceback"])) :]  # the first of a group
    assert __file__ in incident["place"]
    assert "In its thread" not in text


def test_a_mistake_of_ours_is_shown_whole() -> None:
    with pytest.raises(TypeError) as raised:
        spec_of(3, "m")  # type: ignore[arg-type]
    error = raised.value.with_traceback(raised.value.__traceback__ and raised.value.__traceback__.tb_next)
    shown = TextFormatter().format(
        logging.makeLogRecord({**ERROR, "msg": "x", "exc_info": (TypeError, error, error.__traceback__)})
    )
    assert "models/adapt.py" in shown
    assert "frames of everywire" not in shown


def failing(token: Any = None, password: Any = None) -> None:
    raise ValueError("password=hunter2")


@pytest.mark.parametrize("formatter", [TextFormatter(), JSONFormatter()])
def test_source_lines_are_no_secrets_and_messages_may_be(formatter: logging.Formatter) -> None:
    tokens = iter("ab")
    try:
        failing(token=next(tokens), password="written here")
    except ValueError as e:
        record = logging.makeLogRecord({**ERROR, "msg": "x", "exc_info": (ValueError, e, e.__traceback__)})
    text = formatter.format(record)
    assert "token=next(tokens)" in text
    assert "written here" not in text
    assert "ValueError: password=********" in text
    assert "hunter2" not in text


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("while (item := await step(token=token)) is not None:", None),
        ("url = f'https://{user}:{password}@host'", None),
        ("headers = {'Authorization': f'Bearer {key}', 'token': key}", None),
        ("login(api_key='abc')", "login(api_key='********')"),
        ("{'token': \"abc\"}", "{'token': \"********\"}"),
        ("connect('postgres://me:hunter2@host')", "connect('postgres://********@host')"),
        ("key = 'hf_abcdefghijk'", "key = '********'"),
    ],
)
def test_in_a_source_line_only_what_is_written_out_is_a_secret(source: str, shown: str | None) -> None:
    for frame, margin in (('  File "app.py", line 3, in f', "    "), ('  |   File "app.py", line 3, in f', "  |     ")):
        text = f"token=abc\n{frame}\n{margin}{source}\nValueError: token=abc"
        expected = f"token=********\n{frame}\n{margin}{shown or source}\nValueError: token=********"
        assert text_without_secrets(text) == expected


def test_an_exception_of_a_process_looks_as_it_did_there_and_the_end_of_one_is_no_traceback() -> None:
    from models.tracebacks.text import explains

    there = 'Traceback (most recent call last):\n  File "app.py", line 3, in f\n    f(token=x)\nValueError: x'
    with pytest.raises(RaisedThere) as raised:
        _raise(Ended(1, "raised", "ValueError: x", trace=there))
    info = (RaisedThere, raised.value, raised.value.__traceback__)
    lines = TextFormatter().format(logging.makeLogRecord({**ERROR, "msg": "x", "exc_info": info})).split("\n    ")
    assert lines[1:] == there.split("\n")
    assert explains(raised.value) is raised.value
    assert explains(InstanceEnded("its process ended (SIGSEGV at app.py line 11)")) is None
