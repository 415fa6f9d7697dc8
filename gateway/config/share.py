"""How many processes serve, and what of the limits each of them has."""

from __future__ import annotations

import os
from dataclasses import replace

from gateway.config.tree import Config

DIVIDED = (("limits", "total_bytes"), ("limits", "connections"), ("repository", "memory"))
"""The settings that are of all processes together."""


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes_of(config: Config) -> int:
    """How many processes `listen.processes` means here."""
    return config.listen.processes or usable_cores()


def share_of(value: int, processes: int) -> int:
    """What one of the processes has of a limit, rounded up."""
    return -(-value // processes)


def configuration_of_each(config: Config, processes: int) -> Config:
    """What each of so many processes is configured with."""
    limits, repository = config.limits, config.repository
    total = share_of(limits.total_bytes, processes)
    own = replace(limits, total_bytes=total, body=-1).body  # computed, where nobody has said it
    computed = limits.body == replace(limits, body=-1).body
    return replace(
        config,
        listen=replace(config.listen, processes=processes),
        limits=replace(
            limits,
            total_bytes=total,
            body=own if computed else min(limits.body, total),
            connections=share_of(limits.connections, processes),
        ),
        repository=replace(repository, memory=share_of(repository.memory, processes)),
    )
