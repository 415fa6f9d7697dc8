"""The list of models, and one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.json import encode

from protocols.openai.answer import clean


def model_body(name: str, *, created: int, owned_by: str = "everywire", context: int = 0, root: str = "") -> bytes:
    """The body of `GET /v1/models/{model}`. `created` is in seconds since 1970. `context`, `root`: as in `models_body`."""
    return encode(_model(name, created, owned_by, context, root))


def models_body(
    models: Iterable[tuple[str, int]],
    *,
    owned_by: str = "everywire",
    contexts: Mapping[str, int] | None = None,
    roots: Mapping[str, str] | None = None,
) -> bytes:
    """The body of `GET /v1/models`, for names and their creation times. `contexts` has the most tokens of prompt and answer
    together by name: vLLM's `max_model_len`, which a model whose number is unknown (0) does not have. `roots` has the own
    name of each model that is listed by another one: vLLM's `root`."""
    told, owners = contexts or {}, roots or {}
    listed = [_model(name, created, owned_by, told.get(name, 0), owners.get(name, "")) for name, created in models]
    return encode({"object": "list", "data": listed})


def _model(name: str, created: int, owned_by: str, context: int, root: str) -> dict[str, object]:
    model: dict[str, object] = {"id": clean(name), "object": "model", "created": created, "owned_by": owned_by}
    if root:
        model["root"] = clean(root)
    if context:
        model["max_model_len"] = context
    return model
