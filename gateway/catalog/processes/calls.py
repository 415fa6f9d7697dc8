"""Chooses the process of each session: the ready one with the fewest sessions, or the one that has its sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from operator import attrgetter
from typing import Any

import trio

from gateway.catalog.processes.formatting import InstanceFormatting
from gateway.errors import WorkerLost
from gateway.instances.instance import Instance, asking, locate
from gateway.instances.memory import Arena
from gateway.instances.messages import Load
from gateway.workers.snapshot import InstanceStatus
from models.errors import ModelError
from models.messages import Family, InferRequest
from models.session import Session
from models.spec import Model, ModelSpec
from models.tracebacks.parked import Parked

_THREADS = 64
_ANSWERS = 1.0  # seconds in which a process whose loop runs says where a session is


class _Elsewhere:
    """A function of a model's code in another process. Call it from a thread."""

    elsewhere = True

    def __init__(self, ask: Callable[[str, Any], Awaitable[Any]], name: str) -> None:
        self._ask, self._name = ask, name

    def __call__(self, argument: Any) -> Any:
        return trio.from_thread.run(self._ask, self._name, argument)


class InstanceCalls(ABC):
    """The processes of one model, called as one."""

    def __init__(self, spec: ModelSpec, bodies: Arena | None) -> None:
        """`bodies` is the shared memory in which bodies for the model should be received; None: any memory will do."""
        self._spec, self._bodies = spec, bodies
        self.parameters: frozenset[str] | None = None
        self.chat_template: _Elsewhere | None = None
        self.count_tokens: _Elsewhere | None = None
        self.context = 0
        self.features = frozenset[str]()
        self.check_format: _Elsewhere | None = None

    @abstractmethod
    def _ready(self) -> list[Instance]:
        """Returns the instances that may take a new session."""

    @abstractmethod
    def _of_sequence(self, sequence: Any, request: InferRequest) -> Instance:
        """Returns the instance that has a sequence, or one for a new sequence. WorkerLost if none is ready; ModelError if
        the sequence is lost."""

    @property
    @abstractmethod
    def __model_instances__(self) -> Iterator[InstanceStatus]:
        """Yields the present status of each process. The name is one that no user's model has as an attribute."""

    @abstractmethod
    def _instances(self) -> Iterable[Instance]:
        """Returns all instances that may have sessions."""

    def __model_asking__(self) -> set[object]:
        """The callers whose sessions have nothing more to read in their processes: see `instance.asking`."""
        return {getattr(holder, "caller", None) for instance in self._instances() for holder in asking(instance)}

    async def __model_place__(self, caller: object) -> Parked | None:
        """Asks the process of a caller's session where its code waits. None if there is no such session, or the process does
        not answer within a second."""
        with trio.move_on_after(_ANSWERS), suppress(WorkerLost):
            for instance in [*self._instances()]:
                if (place := await locate(instance, caller)) is not None:
                    return place
        return None

    @property
    def __model_bodies__(self) -> Arena | None:
        """The shared memory in which whole bodies for the model should be received, so that its processes need no copy."""
        return self._bodies

    @property
    def _load(self) -> Load:
        return load_of(self._spec)

    def _hear(self, instance: Instance) -> bool:
        """Stores the properties of the model that a loaded instance has sent; False if the instance has ended."""
        said = instance.loaded
        if said is None:
            return False
        self.parameters = None if said.parameters is None else frozenset(said.parameters)
        self.chat_template = _Elsewhere(self._ask, "chat_template") if said.chat_template else None
        self.count_tokens = _Elsewhere(self._ask, "count_tokens") if said.count_tokens else None
        self.context = said.context
        self.features = frozenset(said.features)
        self.check_format = _Elsewhere(self._ask, "check_format") if said.check_format else None
        return True

    async def __call__(self, session: Session[Any, Any], /) -> None:
        first = None
        if self._spec.family is not Family.PARTS:  # a model of parts may send before it receives
            with suppress(trio.EndOfChannel):
                first = await session.receive()
        instance: Instance = getattr(session.channel, "runs_in", None) or self._chosen(first)
        await instance.call(session, first)

    def _chosen(self, first: object) -> Instance:
        """Returns the ready instance with the fewest sessions, or, for a request of a sequence, the one that has it."""
        if type(first) is InferRequest and (sequence := first.parameters.get("sequence_id")):
            return self._of_sequence(sequence, first)
        ready = self._ready()
        if not ready:
            raise self._none_ready()
        return min(ready, key=attrgetter("busy"))

    def _none_ready(self) -> WorkerLost:
        return WorkerLost(f"no process of model {self._spec.name!r} is ready; try again")

    def __model_formatting__(self, id: str) -> InstanceFormatting:
        """Returns the formatters of the request `id`, in an instance of the model."""
        return InstanceFormatting(self._chosen(None), id, writes=self._spec.output_formatter is not None)

    async def _ask(self, function: str, argument: Any) -> Any:
        return await self._chosen(None).ask(function, argument)


class UnfinishedLoad(ABC):
    """The `load` of a model in processes, before its spec contains the configuration."""

    @abstractmethod
    def complete(self, spec: ModelSpec) -> ModelSpec:
        """Returns the spec to serve, from the spec with the configuration in it."""

    def __call__(self) -> AbstractAsyncContextManager[Model]:
        raise AssertionError("a model in processes is loaded by its completed spec")


def load_of(spec: ModelSpec) -> Load:
    """Makes the message that asks a process to load the model."""
    threads = spec.threads or min(spec.capacity, _THREADS)
    return Load(threads, spec.step_timeout, spec.stop_within, spec.stuck_limit)


def lost_sequence(sequence: Any) -> ModelError:
    """Makes the error for a request of a sequence whose process has ended."""
    return ModelError(f"sequence {sequence} is lost: its process ended; begin it again", code="SequenceLost", status=400)
