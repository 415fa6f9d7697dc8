"""`python -m gateway.catalog.process_child SOCKET PARENT MEMORY_LIMIT LOOP [shared] DESCRIPTOR ...`: a model's process."""

from __future__ import annotations

import logging
import socket
import sys

import trio

from gateway.catalog.factories import made_spec
from gateway.catalog.folder import ModelFolder, Place, make_spec
from gateway.catalog.process_model import SHARED, described_fields
from gateway.config import ModelConfig
from gateway.config.problem import ConfigError
from gateway.errors import GatewayError
from gateway.instances.child import told
from gateway.instances.memory import SharedMemory
from gateway.instances.messages import Describe, Described, Failed, Hello, Message
from gateway.instances.pipe import Pipe
from gateway.instances.socket_stream import SocketStream
from gateway.instances.spawn import bind_to_parent, limit_memory
from gateway.instances.trio_child import TrioChild
from gateway.version import version
from models.errors import is_failure
from models.spec import ModelSpec
from models.tracebacks.text import text_of


def main() -> None:
    descriptor, parent, memory_limit = map(int, sys.argv[1:4])
    bind_to_parent(parent)
    loop, shared = sys.argv[4], sys.argv[5:6] == [SHARED]
    descriptors, links = [*map(int, sys.argv[5 + shared :])], None
    if shared:
        links = socket.socket(fileno=descriptors.pop(0))
        links.setblocking(False)
    memory = SharedMemory.of_descriptors(*descriptors) if descriptors else None
    if memory_limit:
        limit_memory(memory_limit)
    logging.getLogger().setLevel(logging.INFO)  # the gateway filters further, by its own log level
    ours = socket.socket(fileno=descriptor)
    if loop == "asyncio":
        _serve_on_asyncio(ours, memory, links)
    else:
        trio.run(_serve, ours, memory, links)


def _serve_on_asyncio(ours: socket.socket, memory: SharedMemory | None, links: socket.socket | None) -> None:
    import asyncio  # only here, because processes on Trio do not need it

    from gateway.instances.asyncio_child import serve_on_asyncio

    ours.setblocking(False)
    asyncio.run(serve_on_asyncio(ours, Hello(version()), _describe, memory, links))


async def _serve(ours: socket.socket, memory: SharedMemory | None, links: socket.socket | None) -> None:
    pipe = Pipe(SocketStream(ours), memory=memory)
    pipe.post(Hello(version()))
    await TrioChild(pipe, _describe, links).run()


def _describe(message: Describe) -> tuple[ModelSpec | None, Message]:
    try:
        spec = made_spec(message.name, message.factory, message.options) if message.folder is None else _of_folder(message)
        return spec, Described(described_fields(spec), spec.input_formatter is not None, spec.output_formatter is not None)
    except ConfigError as e:
        return None, Failed(str(e), "", configuration=True)
    except GatewayError as e:
        return None, Failed(e.message, "", refusal=type(e).__name__)
    except BaseException as e:
        if not is_failure(e):
            raise
        return None, Failed(told(e), text_of(e))


def _of_folder(message: Describe) -> ModelSpec:
    said = message.folder
    assert said is not None
    folder = ModelFolder(
        place=Place(said.path, said.shown),
        config=ModelConfig(factory=message.factory, options=message.options),
        given={},
        options={},
        code=said.code,
        size=said.size,
        stamp=0,
    )
    return make_spec(folder, message.name, "everywire_model")


if __name__ == "__main__":
    main()
