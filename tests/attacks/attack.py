"""Attacks: each is a function with a name, the settings of its server, and the limits that the defence must keep."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, final

from tests.attacks import programs

if TYPE_CHECKING:
    from tests.attacks.attacker import Attacker

Run = Callable[["Attacker"], None]
Behind = Callable[[Random, bytes], Iterator[bytes]]
"""Makes the bytes that a container behind the server sends on one connection, from the head of the request."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One attack. The fields behind `settings` are judged: what does not hold is a failure."""

    name: str
    what: str
    """A line for the list: the first of its function's docstring."""
    run: Run
    settings: tuple[str, ...] = ()
    """Settings of the server, as `--set` takes them; `{folder}` is a folder of this run alone."""
    models: Mapping[str, str] = field(default_factory=dict)
    """More of them, each with its factory. `echo`, `identity` and `tokens` are there."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files of that folder with their text, written before the server starts."""
    fields: tuple[tuple[str, str], ...] = ()
    """Fields that good clients send with each request, such as a key."""
    behind: Behind | None = None
    """How the container behind the server's model `behind` answers; None: there is none. It is asked at `/ping` without that."""
    tls: bool = False
    """True if there is a port with TLS too."""
    metrics: bool = False
    """True if there is a port for metrics too."""
    stalled_log: bool = False
    """True if the server's log goes to a pipe that is never read."""
    descriptors: int = 0
    """How many the server may have; 0: as many as this process."""
    ends: str = ""
    """A pattern of how each connection of the attack must end, such as `goaway 11`. Empty: none is owed."""
    within: float = 1.0
    """Seconds that a connection of the attack may live where its end is owed: one that is younger when all is over is `young`."""
    least: float = 0.0
    """Seconds without which it would show nothing."""
    counters: tuple[str, ...] = ()
    """Metrics of which one sample at least must have risen, by the beginning of their lines in the exposition."""
    events: tuple[str, ...] = ()
    """Events that the log must tell, by their text."""
    lines: int = 20
    """The most lines of one event that the log may grow by, and ten more for each second."""
    growth: int = 32
    """MiB by which the server may grow meanwhile: 32 and what the attack's own legitimate bodies hold."""
    after: int = 8
    """MiB by which it may still be larger 15 s after it. If it is larger, further rounds show whose that is: where one of
    them adds nothing, and nothing of ours is large, it is the allocator's."""
    stop: float = 0.0
    """Seconds from SIGTERM to the server's end, at most; 0: its drain and goodbyes, and two more."""
    nightly: bool = False
    """True if pytest, which has a minute for all attacks, leaves this one to `python -m tests.attacks --all`."""
    fair: bool = True
    """True if good clients must never fail nor wait. If False, the docstring has the reason."""


_found: dict[str, Attack] = {}


def attack(
    name: str,
    *,
    settings: tuple[str, ...] = (),
    models: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    fields: tuple[tuple[str, str], ...] = (),
    behind: Behind | None = None,
    tls: bool = False,
    metrics: bool = False,
    stalled_log: bool = False,
    descriptors: int = 0,
    ends: str = "",
    within: float = 1.0,
    least: float = 0.0,
    counters: tuple[str, ...] = (),
    events: tuple[str, ...] = (),
    lines: int = 20,
    growth: int = 32,
    after: int = 8,
    stop: float = 0.0,
    nightly: bool = False,
    fair: bool = True,
) -> Callable[[Run], Run]:
    """Makes an attack of a function, which stays what it is. The fields are those of Attack."""

    def made(run: Run) -> Run:
        assert name not in _found, f"two attacks are called {name}"
        _found[name] = Attack(
            name=name, what=(run.__doc__ or "").strip().partition("\n")[0], run=run, settings=settings, models=models or {},
            files=files or {}, fields=fields, behind=behind, tls=tls, metrics=metrics, stalled_log=stalled_log, descriptors=descriptors, ends=ends, within=within, least=least,
            counters=counters, events=events, lines=lines, growth=growth, after=after, stop=stop,
            nightly=nightly, fair=fair,
        )  # fmt: skip
        return run

    return made


def attacks() -> dict[str, Attack]:
    """All attacks of the modules in `programs`, by name."""
    for module in pkgutil.iter_modules(programs.__path__):
        importlib.import_module(f"{programs.__name__}.{module.name}")
    return dict(sorted(_found.items()))
