"""The number of processes that serve, and the share of the limits that each of them gets."""

from __future__ import annotations

from dataclasses import replace

from gateway.config.machine import usable_cores
from gateway.config.tree import Config

DIVIDED = (("limits", "total_bytes"), ("limits", "connections"), ("repository", "memory"))
"""The settings whose values all processes share."""


def processes_of(config: Config) -> int:
    """The number of processes that `listen.processes` asks for on this machine."""
    return config.listen.processes or usable_cores()


def share_of(value: int, processes: int) -> int:
    """One process's share of a limit, rounded up."""
    return -(-value // processes)


def configuration_of_each(config: Config, processes: int) -> Config:
    """The configuration of each of several processes."""
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
