"""Models that do what their prompt says, for the console to show."""

from collections.abc import AsyncIterator

import trio

from models.messages import InferRequest, InferResponse, Part, Prompt
from models.session import Session
from models.spec import TensorSpec, declare


async def chat(prompt: Prompt) -> AsyncIterator[str]:
    """`COUNT PAUSE`: so many tokens, so many seconds apart."""
    count, pause = prompt.text.split()
    for number in range(int(count)):
        yield f"{number} "
        await trio.sleep(float(pause))


async def flaky(prompt: Prompt) -> AsyncIterator[str]:
    raise RuntimeError(prompt.text)
    yield ""


async def big(prompt: Prompt) -> AsyncIterator[str]:
    """As much as the client takes."""
    for _ in range(60_000):
        yield "y" * 2000
        await trio.sleep(0.001)


async def deaf(session: Session[Part, Part]) -> None:
    """Takes none of its input."""
    await trio.sleep_forever()


@declare(
    inputs=[TensorSpec(name="rows", datatype="INT8", shape=(-1, 2))],
    outputs=[TensorSpec(name="rows", datatype="INT8", shape=(-1, 2))],
)
async def pairs(session: Session[InferRequest, InferResponse]) -> None:
    """Sends its input back."""
    async for request in session:
        await session.send(InferResponse(outputs=list(request.inputs), id=request.id))
