"""Models that the AWS SDK's tests serve: they say what they saw, and a ledger knows how far each came."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from models.adapt import spec_of
from models.errors import ModelError
from models.messages import Part, PartKind
from models.session import Session
from models.spec import ModelSpec

BLOCK = 4096


class Entry:
    """The progress of one session, from which another session answers questions."""

    def __init__(self) -> None:
        self.sent = 0
        self.ending = ""
        self.ended = trio.Event()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Notes how the block ends."""
        try:
            yield
            self.ending = "returned"
        except Exception:
            self.ending = "raised"
            raise
        except BaseException:  # Cancelled, or a group of it
            self.ending = "cancelled"
            raise
        finally:
            self.ended.set()


_ledger: dict[str, Entry] = {}


async def _entry(session: Session[Part, Part]) -> Entry:
    """The first part is the name of the entry."""
    name = bytes((await session.receive()).data).decode()
    return _ledger.setdefault(name, Entry())


async def ledger(session: Session[Part, Part]) -> None:
    """`sent NAME` is answered with how much that session has sent; `ended NAME`, once it has ended, with how."""
    async for part in session:
        what, _, name = bytes(part.data).decode().partition(" ")
        entry = _ledger[name]
        if what == "ended":
            await entry.ended.wait()
        await session.send(Part(data=(entry.ending if what == "ended" else str(entry.sent)).encode()))


async def flood(session: Session[Part, Part]) -> None:
    """Sends numbered blocks until a second part comes, then how many it has sent."""
    entry = await _entry(session)

    async def send() -> None:
        while True:
            await session.send(Part(data=b"%d " % entry.sent + bytes(BLOCK)))
            entry.sent += 1

    with entry.kept():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await session.receive()
            nursery.cancel_scope.cancel()
        await session.send(Part(data=b"sent %d" % entry.sent))


async def held(session: Session[Part, Part]) -> None:
    """Says that it is there, then nothing more, until it is stopped."""
    entry = await _entry(session)
    with entry.kept():
        await session.send(Part(data=b"here"))
        await trio.sleep_forever()


async def busy(session: Session[Part, Part]) -> None:
    """Speaks ten times a second, until it is stopped."""
    while True:
        await session.send(Part(data=b"still here"))
        await trio.sleep(0.1)


async def told(session: Session[Part, Part]) -> None:
    """Says how it was called."""
    call = session.call
    said = {"model": call.model, "path": call.path, "query": call.query, "id": call.id}
    await session.send(Part(data=json.dumps(said).encode(), kind=PartKind.UTF8))


async def listener(session: Session[Part, Part]) -> None:
    """Listens to the end, then gives all parts back, the last one first."""
    parts = [Part(data=bytes(part.data), kind=part.kind, last=part.last) async for part in session]
    for part in reversed(parts):
        await session.send(part)


async def hasty(session: Session[Part, Part]) -> None:
    """Answers the first part and returns, whatever else may come."""
    await session.send(await session.receive())


async def zeros(session: Session[Part, Part]) -> None:
    """Each part is a number of bytes to send."""
    async for part in session:
        await session.send(Part(data=bytes(int(bytes(part.data)))))


async def failing(session: Session[Part, Part]) -> None:
    """Echoes parts until one says fail, or crash."""
    async for part in session:
        match bytes(part.data):
            case b"fail":
                raise ModelError("the part said fail", code="SaidFail")
            case b"crash":
                raise RuntimeError("a secret of the server")
        await session.send(part)


async def _guarded(session: Session[Part, Part]) -> None:
    """Refuses who does not give the word, before it takes the session."""
    if session.call.query != "word=open":
        raise ModelError("the word is wrong", code="WrongWord", status=403)
    session.accept()
    async for part in session:
        await session.send(part)


guarded: ModelSpec = spec_of(_guarded, "guarded", accepts=True)
