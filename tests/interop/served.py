"""Models that the interop tests serve beside the library's."""

from collections.abc import AsyncIterator

import trio

from models.errors import ModelError
from models.messages import Part, Prompt
from models.session import Session


async def paced(prompt: Prompt) -> AsyncIterator[str]:
    """A token each 50 ms."""
    for i in range(prompt.parameters.max_new_tokens):
        if i:
            await trio.sleep(0.05)
        yield f" {i}"


async def failing(session: Session[Part, Part]) -> None:
    """Echoes parts until one says fail, or crash."""
    async for part in session:
        match bytes(part.data):
            case b"fail":
                raise ModelError("the part said fail", code="SaidFail")
            case b"crash":
                raise RuntimeError("a secret of the server")
        await session.send(part)
