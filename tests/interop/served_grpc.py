"""Models that clients of gRPC call. One of them waits for an event in another and reports it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import numpy as np
import trio

from models.adapt import spec_of
from models.errors import ModelError
from models.messages import Family, InferRequest, InferResponse, Prompt, Tensor, Token
from models.session import Session
from models.spec import Model, ModelSpec, RestartPolicy, TensorSpec

S: TypeAlias = Session[InferRequest, InferResponse]

happened: dict[str, trio.Event] = defaultdict(trio.Event)
"""Events in the models, by words such as "begun one" and "cancelled one"."""
tries: dict[str, int] = defaultdict(int)
"""How often `refusing` was called for a name, and how many "pieces of" a name `flowing` has sent."""


def texts(name: str, *said: str) -> InferResponse:
    return InferResponse(outputs=[Tensor(name=name, data=np.array([t.encode() for t in said], dtype=object))])


def word(request: InferRequest) -> str:
    """The text of a request's first element."""
    element = request.inputs[0].data.flat[0]
    return element.decode() if isinstance(element, bytes) else str(element)


async def waiting(session: S) -> None:
    """Waits until `says` is told to go on with its word. Sets an event when it begins, and when it is cancelled."""
    async for request in session:
        name = word(request)
        happened[f"begun {name}"].set()
        try:
            await happened[f"go {name}"].wait()
        except trio.Cancelled:
            happened[f"cancelled {name}"].set()
            raise
        await session.send(texts("OUTPUT0", name))


async def says(session: S) -> None:
    """Makes it happen: `waiting` goes on."""
    async for request in session:
        happened[f"go {word(request)}"].set()
        await session.send(texts("OUTPUT0", "done"))


async def tells(session: S) -> None:
    """Answers when what the request says has happened."""
    async for request in session:
        await happened[word(request)].wait()
        await session.send(texts("OUTPUT0", word(request)))


async def headers(session: S) -> None:
    """The call's headers, parameters and party, as JSON."""
    async for request in session:
        call = session.call
        told = {"headers": dict(call.headers), "party": call.party, "parameters": dict(request.parameters)}
        await session.send(texts("OUTPUT0", json.dumps(told)))


async def counting(session: S) -> None:
    """As many numbers as the request says, each alone; a negative one fails after so many."""
    async for request in session:
        many = int(request.inputs[0].data.flat[0])
        for number in range(abs(many)):
            await session.send(InferResponse(outputs=[Tensor(name="OUTPUT0", data=np.array([number], np.int32))]))
        if many < 0:
            raise ModelError("no more numbers", status=409)


async def flowing(session: S) -> None:
    """Pieces of 64 KiB without an end, and how many there were when it is cancelled."""
    async for request in session:
        name, sent = word(request), 0
        try:
            while True:
                await session.send(texts("OUTPUT0", "x" * 65_536))
                sent += 1
                if sent == 1:
                    happened[f"begun {name}"].set()
        finally:
            tries[f"pieces of {name}"] = sent
            happened[f"cancelled {name}"].set()


async def refusing(session: S) -> None:
    """Is busy (503) as often as the request says before it answers with how often it was called: "name 2"."""
    async for request in session:
        name, _, busy = word(request).partition(" ")
        tries[name] += 1
        if tries[name] <= int(busy):
            raise ModelError("busy", code="Busy", status=503)
        await session.send(texts("OUTPUT0", str(tries[name])))


async def tried(session: S) -> None:
    """Answers with the count in `tries` for a name."""
    async for request in session:
        await session.send(texts("OUTPUT0", str(tries[word(request)])))


async def failing(session: S) -> None:
    """Raises what the request says: the status of a ModelError, "model" for one without a status, or else a bug."""
    async for request in session:
        said = word(request)
        if said.isdigit():
            raise ModelError("the model refuses, grün", code="Refused", status=int(said))
        if said == "model":
            raise ModelError("the model refuses, grün")
        raise RuntimeError("a secret of the server")


@asynccontextmanager
async def crashing() -> AsyncIterator[Model]:
    """Its worker ends when it is told "crash"; loaded again, it waits for `says`."""
    if tries["loads"]:
        happened["loading again"].set()
        await happened["go load"].wait()
    tries["loads"] += 1
    crash = trio.Event()

    async def answer(session: S) -> None:
        async for request in session:
            if word(request) == "crash":
                crash.set()
                await trio.sleep_forever()
            await session.send(texts("OUTPUT0", "well"))

    async def work() -> None:
        await crash.wait()
        raise RuntimeError("the worker is gone")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(work)
        yield answer
        nursery.cancel_scope.cancel()


async def speaking(prompt: Prompt) -> AsyncIterator[Token]:
    """A model of text: the words of its prompt, each with its temperature in front."""
    for number, word in enumerate(prompt.text.split()):
        yield Token(id=number, text=f"{prompt.parameters.temperature}{word} ")


MODELS: dict[str, tuple[Any, str, str]] = {
    "speaking": (speaking, "", ""),
    "waiting": (waiting, "BYTES", "BYTES"),
    "says": (says, "BYTES", "BYTES"),
    "tells": (tells, "BYTES", "BYTES"),
    "headers": (headers, "BYTES", "BYTES"),
    "counting": (counting, "INT32", "INT32"),
    "flowing": (flowing, "BYTES", "BYTES"),
    "refusing": (refusing, "BYTES", "BYTES"),
    "tried": (tried, "BYTES", "BYTES"),
    "failing": (failing, "BYTES", "BYTES"),
    "crashing": (crashing, "BYTES", "BYTES"),
}
DECOUPLED = ("counting", "flowing")


def served(model: str) -> ModelSpec:
    """The model of that name in MODELS."""
    made, takes, gives = MODELS[model]
    if made is speaking:
        return spec_of(made, model)

    @asynccontextmanager
    async def ready() -> AsyncIterator[Model]:
        yield made

    load: Callable[[], Any] = crashing if made is crashing else ready
    return ModelSpec(
        name=model, family=Family.TENSOR, load=load, decoupled=model in DECOUPLED,
        inputs=(TensorSpec(name="INPUT0", datatype=takes, shape=(1,)),),
        outputs=(TensorSpec(name="OUTPUT0", datatype=gives, shape=(1,)),),
        restart=RestartPolicy(backoff=0.01, backoff_max=0.01),
    )  # fmt: skip


def configuration() -> list[str]:
    """The lines that serve them all, beside those of served_v2, and that let messages of 64 MiB pass."""
    lines = ["v2 = { model_control = true }", "limits = { body = 83_886_080, total_bytes = 2_147_483_648 }"]
    return [*lines, *models()]


def models() -> list[str]:
    """Those of them that name the models."""
    return [f'[models.{name}]\nfactory = "served_grpc:served"\noptions = {{ model = "{name}" }}' for name in MODELS]
