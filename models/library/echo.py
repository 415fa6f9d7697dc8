"""Sends every part back: the smallest duplex model."""

from __future__ import annotations

from typing import final

from models.messages import Part
from models.session import Session


@final
class Echo:
    """Answers each part (family PARTS) with that part, at once and unchanged, until the end of input.

    It holds one part: the next is taken when the last one had room to leave.
    """

    async def __call__(self, session: Session[Part, Part]) -> None:
        async for part in session:
            await session.send(part)
            del part  # many sessions are silent for long: none of them holds what it said last
