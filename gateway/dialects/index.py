"""`GET /`: the name of this server and the paths to try, for people and for programs."""

from __future__ import annotations

import html
from typing import final
from urllib.parse import quote

import msgspec

from gateway.core.exchange import Exchange
from gateway.core.route import Needs, Row
from gateway.dialects.answers import JSON
from gateway.dialects.model_choice import ModelChoice
from models.messages import Family
from protocols.v2.frames import media_weights

_DOCS = "/v2/openapi.json"
_MOST = 100  # names of models in the answer: GET /v2/models has them all
_CALLS = {Family.TEXT: "/v2/models/{}/generate", Family.TENSOR: "/v2/models/{}/infer", Family.PARTS: "/models/{}/invoke"}
_VARY = (b"vary", b"accept")
# The page is text and links. The browser must run and load nothing, whatever name a model has.
_PAGE = (
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", b"default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    _VARY,
)


class _Index(msgspec.Struct):
    name: str
    docs: str
    models: list[str]
    try_: list[str] = msgspec.field(name="try")


@final
class IndexDialect:
    """Answers 200, also while the server drains: an object with `name`, `docs`, `models` and three paths to `try`. If the
    request's Accept prefers HTML, as a browser's does, the answer is a page that says the same. It names the models that the
    caller may list, as `GET /v2/models` does."""

    def __init__(self, models: ModelChoice) -> None:
        self._models = models

    def rows(self) -> list[Row]:
        """Its one route."""
        return [Row("GET", "/", self.index, dialect="management", always=True, needs=Needs.METADATA)]

    async def index(self, exchange: Exchange) -> None:
        """GET /."""
        index = self._index(exchange)
        weights = media_weights(exchange.header_values(b"accept"))
        if 0 < weights.get("text/html", 0.0) >= weights.get("application/json", 0.0):
            exchange.outbound.respond(200, _PAGE, _page(index).encode())
        else:
            exchange.outbound.respond(200, (JSON, _VARY), msgspec.json.encode(index))

    def _index(self, exchange: Exchange) -> _Index:
        workers = self._models.seen_by(exchange.permit)
        names = sorted(workers)
        call = "/v2/models/NAME/infer"
        if names:
            call = _CALLS[workers[names[0]].spec.family].format(quote(names[0], safe=""))
        at = exchange.owner.prefix
        tries = [f"GET {at}/v2/health/ready", f"GET {at}/v2/models", f"POST {at}{call}"]
        return _Index(name="everywire", docs=at + _DOCS, models=names[:_MOST], try_=tries)


def _page(index: _Index) -> str:
    models = "".join(f"<li>{html.escape(name)}</li>" for name in index.models) or "<li>none</li>"
    tries = "".join(f"<li>{_link(path)}</li>" for path in index.try_)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{index.name}</title><h1>{index.name}</h1>'
        "<p>A gateway for models. Programs call it; this page says where.</p>"
        f"<h2>Models</h2><ul>{models}</ul><h2>Try</h2><ul>{tries}</ul>"
        f"<p>All routes of the Open Inference Protocol: {_link(f'GET {index.docs}')[4:]}</p></html>\n"
    )


def _link(said: str) -> str:
    """The path as a link if a browser can follow it (GET), otherwise as text."""
    method, _, path = said.partition(" ")
    shown = html.escape(path)
    return f'{method} <a href="{shown}">{shown}</a>' if method == "GET" else f"{method} {shown}"
