"""A client in a process of its own, to be stopped and killed: reads what the models `flood` and `held` send.

    python -m tests.interop.aws_client TLS_PORT CA MODEL NAME

Prints `reading` after the first part, ends the session at a line of its standard input, and prints how many numbered parts
came, in order and whole.
"""

import asyncio
import sys
from pathlib import Path

from tests.interop.aws import BLOCK, client, run
from tests.interop.servers import Server


async def story(server: Server, model: str, name: str) -> None:
    async with client(server) as aws:
        stream = await aws.call(model)
        await stream.send(name.encode())
        came = 0

        async def told() -> None:
            await asyncio.to_thread(sys.stdin.readline)
            await stream.send(b"enough")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(told())
            while not (data := await stream.answer()).startswith(b"sent "):
                if not came:
                    print("reading", flush=True)
                if model == "flood":
                    assert data == b"%d " % came + bytes(BLOCK), f"part {came} is another"
                came += 1
        assert data == b"sent %d" % came, f"{came} came, the model says {data!r}"
        assert await stream.receive() is None
        print(came)


if __name__ == "__main__":
    port, ca, model, name = sys.argv[1:]
    run(story(Server("127.0.0.1", 0, int(port), Path(ca), 0), model, name))
