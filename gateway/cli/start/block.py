"""The start block, printed on a terminal once the server serves: its calls can be copied and run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from urllib.parse import quote

from gateway.addresses import UNIX, reached_at
from gateway.catalog.factories import LIBRARY
from gateway.config import Config
from gateway.config.agreement import has_plane
from gateway.config.exposure import UNVERIFIED, closes, verifies_nothing
from gateway.gateway import Gateway
from gateway.version import version
from gateway.workers.states import State
from models.messages import Family
from models.spec import ModelSpec, TensorSpec

DEVELOPMENT = ("Not for production: what runs is cut when a file changes, and the models start anew.",)
"""Notes of `everywire dev`."""
_NAMES = 8
"""Names of models in the block, at most."""
_TEXT, _TEXT_OF_LM = "hello every wire", "Return the"
_SIZE = 4  # elements for a dimension that may have any size
_MOST = 16  # elements of the largest tensor that is printed in a call


def start_block(gateway: Gateway, notes: Sequence[str] = (), *, plane_port: int = 0) -> str:
    """The block of a gateway that serves. `notes` are more lines for the user who started it. `plane_port` is the port of an
    operator plane that another process offers."""
    config = gateway.config
    lines = [f"everywire {version()} at {', '.join(gateway.addresses)}", _models(gateway)]
    if closes(config):
        lines.append("Requests need a key, a certificate or a signature.")
    elif calls := _calls(gateway):
        lines += ["Try:", *(f"  {call}" for call in calls)]
    plane = config.operator
    # If the port of the plane is taken, there is no console, and the log has the reason.
    if has_plane(plane) and (console := reached_at(plane.host, gateway.operator_port or plane_port)):
        lines.append(f"Console: {console}")
    lines += notes
    if verifies_nothing(config):
        lines.append(UNVERIFIED)
    lines.append("Ctrl-C stops.")
    return "\n" + "".join(f"  {line}\n" for line in lines) + "\n"


def _models(gateway: Gateway) -> str:
    workers = gateway.supervisor.workers
    said = [
        name if worker.state is State.READY else f"{name} ({worker.state.value})" for name, worker in sorted(workers.items())
    ]
    more = f" and {len(said) - _NAMES} more" if len(said) > _NAMES else ""
    text = f"Models: {', '.join(said[:_NAMES]) or 'none'}{more}"
    if not gateway.config.models and workers.keys() == LIBRARY.keys():
        return f"{text}: these are the library's; yours: everywire dev app.py"
    return text


def _calls(gateway: Gateway) -> list[str]:
    """A call by everywire's own client and one by curl; none if no model takes calls, or none can be called without a
    file."""
    ready = [worker.spec for _, worker in sorted(gateway.supervisor.workers.items()) if worker.state is State.READY]
    # Text models first: text is the easiest input to type. Tensor models last.
    ready.sort(key=lambda spec: (spec.family is not Family.TEXT, spec.family is Family.TENSOR))
    where = _where(gateway)
    if not ready or not where:
        return []
    spec, (url, curl) = ready[0], where
    name, path = shlex.quote(spec.name), quote(spec.name, safe="")
    usual = Config().listen
    call = "everywire call" if url == reached_at(usual.host, usual.port) else f"everywire call --url {url}"
    match spec.family:
        case Family.TEXT:
            text = _TEXT_OF_LM if spec.name == "lm" else _TEXT
            body = json.dumps({"inputs": text, "stream": True})
            return [f'{call} {name} "{text}"', f"{curl}/predictions/{path} -d {shlex.quote(body)}"]
        case Family.PARTS:
            return [f'{call} {name} "{_TEXT}" --wire invoke', f"{curl}/models/{path}/invoke -d {shlex.quote(_TEXT)}"]
        case Family.TENSOR:
            inputs = _inputs(spec)
            if inputs is None:
                return [f"{curl}/v2/models/{path}"]
            return [f"{curl}/v2/models/{path}/infer -d {shlex.quote(json.dumps({'inputs': inputs}))}"]


def _where(gateway: Gateway) -> tuple[str, str] | None:
    """The server's URL for `--url`, and the beginning of a curl command; None if no address takes clear text."""
    for address in gateway.addresses:
        if address.startswith(UNIX):
            path = shlex.quote(address.removeprefix(UNIX))
            return shlex.quote(address), f"curl -N --unix-socket {path} http://localhost"
        scheme, _, authority = address.partition("://")
        host, _, port = authority.rpartition(":")
        if scheme == "http":
            url = reached_at(host.strip("[]"), int(port))
            return url, f"curl -N {url}"
    return None


def _inputs(spec: ModelSpec) -> list[dict[str, object]] | None:
    """Zeros for the inputs of a tensor model; None if it does not declare them, or they are too large to print."""
    if spec.inputs is None:
        return None
    given = [_input(tensor, batched=spec.max_batch_size > 0) for tensor in spec.inputs if not tensor.optional]
    return None if None in given else [one for one in given if one is not None]


def _input(tensor: TensorSpec, *, batched: bool) -> dict[str, object] | None:
    if tensor.shape is None or not tensor.datatype:
        return None
    shape = [1] * batched + [_SIZE if size < 0 else size for size in tensor.shape]
    elements = 1
    for size in shape:
        elements *= size
    if elements > _MOST:
        return None
    value = {"BYTES": "a", "BOOL": True}.get(tensor.datatype, 0)
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": shape, "data": [value] * elements}
