"""Sends every part back: the smallest duplex model."""

from __future__ import annotations

from typing import final

from models.messages import Part
from models.session import Session


@final
class Echo:
    """Answers each part (family PARTS) with that part, at once and unchanged, until the end of input.

    It holds one part at a time: it takes the next when the last one has been given to the wire.
    """

    async def __call__(self, session: Session[Part, Part]) -> None:
        async for part in session:
            await session.send(part)
            del part  # an idle session must not keep its last part in memory
