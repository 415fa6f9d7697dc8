"""The server of the multi-model walk: a gateway that tells its ledger to whoever writes a line to its input."""

from __future__ import annotations

import json
import logging
import resource
import sys
from collections import Counter
from typing import final

import trio

from gateway.catalog.process_memory import resident_bytes, share_one_arena
from gateway.config import Config, EndpointConfig, ListenConfig, RepositoryConfig, SageMakerConfig
from gateway.gateway import Gateway

_SAMPLE = 0.002


@final
class _Told(logging.Handler):
    """Counts what the repository says that it did."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        self.counts[record.msg] += 1


async def serve(root: str, memory: int) -> None:
    """Serves the models below `root` in that budget, as a container at /models and as the endpoint `many`, until the end of
    the input. A line of it is answered by a line of JSON: the port, and what is held."""
    gateway = Gateway(
        Config(
            listen=ListenConfig(port=0, tls_port=-1),
            sagemaker=SageMakerConfig(multi_model=True),
            repository=RepositoryConfig(roots=(root,), memory=memory),
            endpoints={"many": EndpointConfig(models=root)},
        )
    )
    told, most = _Told(), 0
    log = logging.getLogger("gateway.repository")
    log.addHandler(told)
    log.setLevel(logging.INFO)
    log.propagate = False

    async def sample() -> None:
        nonlocal most
        while True:
            most = max(most, gateway.repository.used)
            await trio.sleep(_SAMPLE)

    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.serve)
        nursery.start_soon(sample)
        while await trio.to_thread.run_sync(sys.stdin.readline):
            counts = gateway.counts()
            print(
                json.dumps(
                    {
                        "port": gateway.port,
                        "bytes": gateway.budget.used,
                        "memory": gateway.repository.used,
                        "memory_peak": most,
                        "taken": gateway.repository.names,
                        "workers": sorted(gateway.supervisor.workers),
                        "slots": counts.slots_in_use,
                        "exchanges": counts.exchanges,
                        "connections": counts.connections,
                        "endings": counts.endings,
                        "told": told.counts,
                        "resident": resident_bytes(),
                        "resident_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                    }
                ),
                flush=True,
            )
        await gateway.drain()
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    share_one_arena()  # as `python -m gateway serve` does
    trio.run(serve, sys.argv[1], int(sys.argv[2]))
