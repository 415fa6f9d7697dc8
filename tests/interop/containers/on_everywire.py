"""A container on everywire itself: it shows each fragment as it came."""

import json
import sys

import trio

from gateway.config import BidiConfig, Config, ListenConfig
from gateway.gateway import Gateway
from models.messages import Part, PartKind
from models.session import Session


async def fragments(session: Session[Part, Part]) -> None:
    """Says what each part is."""
    async for part in session:
        told = {"hex": bytes(part.data).hex(), "kind": part.kind.name, "last": part.last}
        await session.send(Part(data=json.dumps(told).encode(), kind=PartKind.UTF8))


async def main(port: int) -> None:
    config = Config(listen=ListenConfig(port=port), bidi=BidiConfig(default_model="fragments"))
    gateway = Gateway(config, [fragments])
    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.serve)
        print(f"listening {gateway.port}", flush=True)


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]))
