"""Finds the model of a SageMaker endpoint: by variant, by weight, or in a folder on first use."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import final

from gateway.catalog.repository import Repository
from gateway.catalog.target_model import model_name, model_url
from gateway.config import Config, EndpointConfig, VariantConfig
from gateway.config.problem import ConfigError
from gateway.dialects.model_choice import ModelChoice
from gateway.errors import BadRequest, NotFound
from gateway.keys import Key
from gateway.workers.worker import Worker
from protocols.aws import bidi
from protocols.errors import LocalProtocolError

_SHOWN = 100
_ENDPOINT = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*")


@final
class Endpoints:
    """The configured endpoints. Every model is also an endpoint by its own name, unless an endpoint of that name is
    configured."""

    def __init__(self, config: Config, models: ModelChoice, repository: Repository) -> None:
        self._models, self._repository = models, repository
        self._default_variant = config.sagemaker.variant
        try:
            bidi.invoked_variant(self._default_variant)
        except LocalProtocolError as e:
            raise ConfigError(f"sagemaker.variant: {e}") from None
        self._endpoints = {name: _Endpoint(name, endpoint) for name, endpoint in config.endpoints.items()}

    def check(self) -> None:
        """Raises ConfigError for a variant whose model does not exist, so that the server does not start with it."""
        for endpoint in self._endpoints.values():
            for variant, wanted in endpoint.variants.items():
                if wanted.model not in self._models.workers:
                    there = ", ".join(sorted(self._models.workers)) or "none"
                    raise ConfigError(
                        f"endpoints.{endpoint.name}.variants.{variant}.model: no model {wanted.model!r}; there are: {there}"
                    )

    @asynccontextmanager
    async def chosen(
        self, permit: Key | None, name: str, variant: str | None, target_model: str | None = None
    ) -> AsyncIterator[tuple[Worker, str]]:
        """The model that answers one call, and the call's production variant. Within the block, a model that was loaded for
        this call is not unloaded to make room for another.

        `variant` and `target_model` are the request's headers, None if absent. BadRequest for an unknown variant, NotFound
        for an unknown endpoint or model, NotPermitted if the key does not reach it; the repository's errors for a model that
        cannot be loaded. For an endpoint of many models, the key must reach the endpoint's name.
        """
        endpoint = self._endpoints.get(name)
        if endpoint is not None and endpoint.config.models:
            if not target_model:
                raise BadRequest(
                    f"endpoint {name!r} serves many models: InvokeEndpoint names one in X-Amzn-SageMaker-Target-Model"
                )
            self._models.check(permit, name)
            self._check_variant(name, variant, [self._default_variant])
            url = model_url(endpoint.folder, target_model)
            async with self._repository.in_use(model_name(url), url, shown=target_model) as worker:
                yield worker, self._default_variant
            return
        worker, variant = self._one_of(permit, name, endpoint, variant)
        if target_model and not worker.spec.many:
            raise BadRequest(f"endpoint {name!r} serves one model: X-Amzn-SageMaker-Target-Model must be absent")
        yield worker, variant

    def choose(self, permit: Key | None, name: str, variant: str | None) -> tuple[Worker, str]:
        """Like `chosen`, for an operation that has no target model."""
        endpoint = self._endpoints.get(name)
        if endpoint is not None and endpoint.config.models:
            raise BadRequest(f"endpoint {name!r} serves many models, and this operation cannot name one of them")
        return self._one_of(permit, name, endpoint, variant)

    def _one_of(self, permit: Key | None, name: str, endpoint: _Endpoint | None, variant: str | None) -> tuple[Worker, str]:
        if endpoint is not None:
            # without a variant of its own a call may go to any: a key reaches all of them, or no call depends on chance
            for one in endpoint.variants if variant is None else [variant]:
                if one in endpoint.variants:
                    self._models.check(permit, endpoint.variants[one].model)
            self._check_variant(name, variant, list(endpoint.variants))
            variant = variant or endpoint.next_variant()
            worker = self._models.workers.get(endpoint.variants[variant].model)
            if worker is None:
                raise NotFound(f"the model of variant {variant!r} of endpoint {name!r} is not loaded")
            return worker, variant
        self._models.check(permit, name)
        worker = self._models.workers.get(name)
        if worker is None:
            loaded = set(self._repository.names)
            reached = [name for name in self._endpoints if permit is None or permit.reaches(name)]
            names = sorted({*reached, *filter(_ENDPOINT.fullmatch, self._models.seen_by(permit))} - loaded)
            there = ", ".join(names) or "none"
            raise NotFound(f"no endpoint {name[:_SHOWN]!r}; there are: {there[:1000]}")
        self._check_variant(name, variant, [self._default_variant])
        return worker, self._default_variant

    def _check_variant(self, name: str, variant: str | None, known: list[str]) -> None:
        if variant is not None and variant not in known:
            raise BadRequest(f"endpoint {name!r} has no variant {variant[:_SHOWN]!r}; it has: {', '.join(known)[:1000]}")


@final
class _Endpoint:
    """A configured endpoint. Its variants take turns by weight: in any run of calls each gets its share, to within one
    call."""

    def __init__(self, name: str, config: EndpointConfig) -> None:
        self.name, self.config = name, config
        # Relative to the working directory, like every file name in a configuration.
        self.folder = os.path.abspath(config.models) if config.models else ""
        self.variants: Mapping[str, VariantConfig] = config.variants
        self._total = sum(variant.weight for variant in config.variants.values())
        self._credit = dict.fromkeys(config.variants, 0.0)

    def next_variant(self) -> str:
        """The variant of the next call, by smooth weighted round robin: not random, and without bursts."""
        for name, variant in self.variants.items():
            self._credit[name] += variant.weight
        weighted = [name for name in self.variants if self.variants[name].weight]
        chosen = max(weighted, key=self._credit.__getitem__)
        self._credit[chosen] -= self._total
        return chosen
