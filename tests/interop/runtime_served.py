"""Models that the tests of SageMaker's runtime clients serve: they tell what they see, wait for a word, or fail."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import trio

from gateway.errors import InternalFailure
from models.errors import ModelError
from models.messages import Part, Prompt
from models.session import Session

Parts: TypeAlias = Callable[[Session[Part, Part]], Awaitable[None]]

_events: defaultdict[str, trio.Event] = defaultdict(trio.Event)


async def switch(session: Session[Part, Part]) -> None:
    """`set NAME` or `wait NAME`: how a test and the other models tell one another where they are."""
    async for part in session:
        verb, _, name = bytes(part.data).decode().partition(" ")
        if verb == "set":
            _events[name].set()
        else:
            await _events[name].wait()
        await session.send(part)


async def seen(session: Session[Part, Part]) -> None:
    """Answers with the call's metadata as JSON."""
    call = session.call
    async for part in session:
        said = {
            "headers": dict(call.headers),
            "path": call.path,
            "query": call.query,
            "kind": part.kind.value,
            "size": len(part.data),
        }
        await session.send(Part(data=json.dumps(said).encode()))


async def replying(session: Session[Part, Part]) -> None:
    """The body is a JSON object: the head of the answer. The answer is the bytes 00 to FF."""
    async for part in session:
        session.reply.update(json.loads(bytes(part.data)))
        await session.send(Part(data=bytes(range(256))))


async def stepped(prompt: Prompt) -> AsyncIterator[str]:
    """A token, and the next when somebody has set `TEXT:0`, `TEXT:1` and so on; cancelled, it sets `TEXT:cancelled`."""
    try:
        for i in range(prompt.parameters.max_new_tokens):
            yield f" {i}"
            await _events[f"{prompt.text}:{i}"].wait()
    except trio.Cancelled:
        _events[f"{prompt.text}:cancelled"].set()
        raise


async def failing_text(prompt: Prompt) -> AsyncIterator[str]:
    """Two tokens, unless the prompt is `dry`, then an error that is the client's to see."""
    if prompt.text != "dry":
        yield " 0"
        yield " 1"
    raise ModelError("the text ran dry", code="Dry", status=422)


async def failing_parts(session: Session[Part, Part]) -> None:
    """The body says how: at once, after a part and the word `fail`, as a crash with a secret in it, as a bug of the
    gateway's."""
    async for part in session:
        match bytes(part.data):
            case b"refuse":
                raise ModelError("the part said refuse", code="SaidRefuse", status=418)
            case b"after":
                await session.send(Part(data=b"a part"))
                await _events["fail"].wait()
                raise ModelError("the part said after", code="SaidAfter")
            case b"crash":
                raise RuntimeError("a secret of the server")
            case b"bug":
                raise InternalFailure("a bug of the gateway's own")


async def held(session: Session[Part, Part]) -> None:
    """Keeps its slot from `held` until `let go`."""
    async for part in session:
        _events["held"].set()
        await _events["let go"].wait()
        await session.send(part)


async def halves(session: Session[Part, Part]) -> None:
    """Each part, as two."""
    async for part in session:
        half = len(part.data) // 2
        await session.send(Part(data=part.data[:half]))
        await session.send(Part(data=part.data[half:]))


@asynccontextmanager
async def reloading() -> AsyncIterator[Parts]:
    """Is there at once, crashes at `crash`, and is loaded again from `loading` until `load`."""
    if _events["crash"].is_set():
        _events["loading"].set()
        await _events["load"].wait()
        yield _echo
        return
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_crash)
        yield _echo
        nursery.cancel_scope.cancel()


async def _crash() -> None:
    await _events["crash"].wait()
    raise RuntimeError("the model's background task failed")


async def _echo(session: Session[Part, Part]) -> None:
    async for part in session:
        await session.send(part)


_loads = 0


@asynccontextmanager
async def slow_to_load() -> AsyncIterator[Parts]:
    """Loaded at `loaded`; answers how often it was."""
    global _loads
    _loads += 1
    await _events["loaded"].wait()

    async def answer(session: Session[Part, Part]) -> None:
        async for _ in session:
            await session.send(Part(data=b"%d" % _loads))

    yield answer
