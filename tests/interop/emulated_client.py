"""A client in a process of its own, to be stopped and killed: reads what a container sends, until it ends.

    python -m tests.interop.emulated_client TLS_PORT CA PATH

Prints `reading` after the first part.
"""

import sys
from pathlib import Path

from tests.interop.aws import client, run
from tests.interop.servers import Server


async def story(server: Server, path: str) -> None:
    async with client(server) as aws:
        stream = await aws.call("container", model_invocation_path=path)
        await stream.answer()
        print("reading", flush=True)
        while await stream.receive() is not None:
            pass


if __name__ == "__main__":
    port, ca, path = sys.argv[1:]
    run(story(Server("127.0.0.1", 0, int(port), Path(ca), 0), path))
