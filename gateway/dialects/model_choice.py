"""Picks the model that answers: by the name in the request, or by a rule if the request names none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from gateway.config import Config
from gateway.config.problem import ConfigError
from gateway.errors import BadRequest, GatewayError, NotFound, NotPermitted
from gateway.keys import Key
from gateway.workers.worker import Worker
from models.convert import convertible
from models.messages import Family


@final
class ModelChoice:
    """The models in service, by name, and the rule that picks one if a request names none. `served` are the models by the
    names that OpenAI's clients may use besides the models' own."""

    def __init__(self, config: Config, workers: Mapping[str, Worker], served: Mapping[str, Worker]) -> None:
        self.config, self.workers, self.served = config, workers, served

    def seen_by(self, permit: Key | None) -> Mapping[str, Worker]:
        """The models that a key reaches, by name; all models if there is no key."""
        workers = self.workers
        if permit is None or permit.models == ("*",):
            return workers
        return {name: worker for name, worker in workers.items() if permit.reaches(name)}

    def check(self, permit: Key | None, name: str) -> None:
        """Raises NotPermitted if the key does not reach the model, whether or not the model exists."""
        if permit is not None and not permit.reaches(name):
            raise NotPermitted.of_model(name)

    def check_defaults(self) -> None:
        """Raises ConfigError for a default model that does not exist or cannot answer its dialect: the server then does not
        start."""
        for setting, name, family in (
            ("lmi.default_model", self.config.lmi.default_model, Family.TEXT),
            ("openai.default_model", self.config.openai.default_model, Family.TEXT),
            ("bidi.default_model", self.config.bidi.default_model, Family.PARTS),
        ):
            if name:
                try:
                    self.named(None, name, family, setting.partition(".")[0])
                except GatewayError as e:
                    raise ConfigError(f"{setting}: {e.message}") from None
        name = self.config.sagemaker.default_model
        if name and name not in self.workers:
            raise ConfigError(f"sagemaker.default_model: {self._unknown(None, name)}")

    def _unknown(self, permit: Key | None, name: str) -> str:
        return f"no model {name[:100]!r}; there are: {', '.join(sorted(self.seen_by(permit)))[:1000] or 'none'}"

    def invoked(self, permit: Key | None, name: str) -> Worker:
        """The model of a route that takes every family in its own form. NotFound if it does not exist, NotPermitted if the
        key does not reach it."""
        self.check(permit, name)
        worker = self.workers.get(name)
        if worker is None:
            raise NotFound(self._unknown(permit, name))
        return worker

    def called(self, permit: Key | None, name: str) -> Worker:
        """The model of that name, its own or else a served one, of any family. The errors of `invoked`."""
        if name not in self.workers and (worker := self.by_served_name(permit, name)) is not None:
            return worker
        return self.invoked(permit, name)

    def by_served_name(self, permit: Key | None, name: str) -> Worker | None:
        """The model with that served name. None if there is none, or if the key, which knows own names alone, does not reach
        it: then nothing tells that the name is there."""
        worker = self.served.get(name)
        return None if worker is None or (permit is not None and not permit.reaches(worker.name)) else worker

    def of_invocations(self, permit: Key | None) -> Worker:
        """The model of /invocations if the request names none: the default, the only model, or the only text model."""
        name = self.config.sagemaker.default_model or self.config.lmi.default_model
        if name:
            return self.invoked(permit, name)
        seen = self.seen_by(permit)
        if len(seen) == 1:
            return next(iter(seen.values()))
        return self.unnamed(permit, "", Family.TEXT, "sagemaker")

    def named(self, permit: Key | None, name: str, family: Family, dialect: str) -> Worker:
        """The model that a request names. NotFound if it does not exist, NotPermitted if the key does not reach it,
        BadRequest if it cannot answer this dialect."""
        self.check(permit, name)
        worker = self.workers.get(name)
        if worker is None:
            raise NotFound(self._unknown(permit, name))
        self.check_family(worker, family, dialect)
        return worker

    def check_family(self, worker: Worker, family: Family, dialect: str) -> None:
        """Raises BadRequest if the model cannot answer a dialect of that family."""
        if not convertible(worker.spec.family, family):
            raise BadRequest(
                f"model {worker.name!r} speaks {worker.spec.family.value} and cannot answer {dialect}, "
                f"which speaks {family.value}"
            )

    def unnamed(self, permit: Key | None, default: str, family: Family, dialect: str) -> Worker:
        """The model for a request that names none: the dialect's default, otherwise the only fitting model that the key
        reaches. BadRequest if there is none or several."""
        if default:
            return self.named(permit, default, family, dialect)
        seen = self.seen_by(permit).values()
        speakers = [w for w in seen if w.spec.family is family]
        fitting = speakers or [w for w in seen if convertible(w.spec.family, family)]
        if len(fitting) == 1:
            return fitting[0]
        names = ", ".join(sorted(w.name for w in fitting))
        raise BadRequest(
            f"the request names no model and {len(fitting)} could answer: {names or 'none'}; "
            f"name one in the request or set {dialect}.default_model"
        )
