"""SageMaker's multi-model container API: load, list, get and unload at /models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import final

from gateway.catalog.repository import Repository
from gateway.core.exchange import Exchange
from gateway.core.route import Needs, Row
from gateway.core.whole_body import receive_body
from gateway.dialects.aws.container import refuse_as_mme
from gateway.dialects.call import query_members
from gateway.errors import BadRequest, NotPermitted
from protocols.aws import multi_model

_JSON = (b"content-type", multi_model.CONTENT_TYPE)
_LARGEST = 64 * 1024


@final
class MMEDialect:
    """Answers the platform, which decides which models a container holds."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    def rows(self) -> Sequence[Row]:
        """Its routes."""
        row = partial(Row, dialect="mme", refuse=refuse_as_mme)
        return [
            *(row("POST", path, self.load, needs=Needs.CONTROL) for path in ("/models", "/models/")),
            *(row("GET", path, self.list) for path in ("/models", "/models/")),
            row("GET", "/models/{name}", self.get),
            row("DELETE", "/models/{name}", self.unload, needs=Needs.CONTROL),
        ]

    async def load(self, exchange: Exchange) -> None:
        """POST /models: answered once the model takes calls. If the platform disconnects, the load is cancelled."""
        body = await receive_body(exchange, _LARGEST, setting="64 KiB, fixed")
        try:
            wanted = multi_model.parse_load(body)
        except multi_model.MMEError as e:
            raise BadRequest(e.message) from None
        if not exchange.may_ask(wanted.name):
            raise NotPermitted.of_model(wanted.name)
        exchange.model = wanted.name
        await self._repository.load(wanted.name, wanted.url)
        exchange.outbound.respond(200, [_JSON], multi_model.loaded_body(wanted.name))

    async def list(self, exchange: Exchange) -> None:
        """GET /models."""
        query = dict(reversed(query_members(exchange)))  # the first of a name counts
        page = multi_model.parse_page(query.get("limit", ""), query.get("next_page_token", ""))
        models = [(model.name, model.url) for model in self._repository.list() if exchange.may_ask(model.name)]
        exchange.outbound.respond(200, [_JSON], multi_model.page_body(models, page))

    async def get(self, exchange: Exchange, name: str) -> None:
        """GET /models/{name}."""
        model = self._repository.get(name)
        exchange.outbound.respond(200, [_JSON], multi_model.model_body(model.name, model.url))

    async def unload(self, exchange: Exchange, name: str) -> None:
        """DELETE /models/{name}: answered once nothing of the model is left. It goes on if the platform disconnects."""
        await self._repository.unload(name)
        exchange.outbound.respond(200, [_JSON], multi_model.unloaded_body(name))
