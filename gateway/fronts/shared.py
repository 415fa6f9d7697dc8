"""A front's side of the models whose processes the parent owns: takes their news, and asks for links."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import final

from gateway.catalog.process_model import formatted_there
from gateway.catalog.processes.linked import ModelNews, SharedModel
from gateway.config import ModelConfig
from gateway.config.problem import ConfigError
from gateway.fronts.messages import Begin, KillWanted, LetGo, LinkWanted, Message, packet_of
from gateway.instances.links import LinkedProcess
from gateway.instances.spawn import ProcessPlan
from models.spec import ModelSpec


@final
class SharedModels:
    """The models of one front that run in processes of the parent."""

    def __init__(self, begin: Begin, handed: socket.socket) -> None:
        """`handed` is the packet socket, over which links are sent."""
        self._handed, self._fronts = handed, begin.processes
        self.post: Callable[[Message], None]
        """Sends the parent a message. The front sets it."""
        self._models: dict[str, SharedModel] = {}
        self._formatters = {one.name: (one.input_formatter, one.output_formatter) for one in begin.shared}
        for one in begin.shared:
            plans = [
                ProcessPlan(name=one.name, number=number, shared_memory=one.shared_memory) for number in range(one.instances)
            ]
            self._models[one.name] = SharedModel(one.name, one.fields, plans, self, one.load, begin.number)

    def describe(self, name: str, config: ModelConfig, patience: float) -> ModelSpec:
        """Returns the spec that a model's code declares. ConfigError if the parent has no processes of the model."""
        if name not in self._models:
            said = "the model has no processes: the configuration has changed since the server started; send SIGHUP"
            raise ConfigError(f"models.{name}.process: {said}")
        reads, writes = self._formatters[name]
        return formatted_there(self._models[name].spec(self._fronts), reads=reads, writes=writes)

    def take(self, news: ModelNews) -> None:
        """Takes the parent's news of one model."""
        if (model := self._models.get(news.name)) is not None:
            model.take(news)

    def link(self, id: int, process: LinkedProcess) -> None:
        """Asks the parent to hand a link to that process. OSError if the link cannot be sent."""
        socket.send_fds(self._handed, [packet_of(LinkWanted(id))], process.descriptors)
        process.handed()

    def kill(self, id: int, why: str) -> None:
        """Asks the parent to end the process."""
        self.post(KillWanted(id, why))

    def let_go(self, id: int) -> None:
        """Tells the parent that the link to the process has ended."""
        self.post(LetGo(id))
