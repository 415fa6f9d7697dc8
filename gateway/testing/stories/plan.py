"""Derives the plan of a run from its seed: the calls, their wires, and all that goes wrong. Pure."""

from __future__ import annotations

import enum
import math
import random
from dataclasses import dataclass, field, replace
from typing import Any, final

from gateway.config import BidiConfig, Config, DrainConfig, HTTP2Config, LimitsConfig, ListenConfig, WebSocketConfig
from gateway.instances.messages import Credit, Ended, Head, Loaded, Ping, Text, encoded, frames_of
from gateway.testing.faults import Lie, ModelFaults
from gateway.testing.network import NetworkProfile, Way
from gateway.testing.processes import MemoryPlace
from gateway.testing.stories.talk import Deceit, Form, Hostility, Leave

KiB = 1024
_WAITED_FOR = 4.6
"""Seconds that a process has to leave its `load()`, and to end after that."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TalkPlan:
    """One call."""

    name: str
    form: Form
    model: str
    messages: int
    """The number of messages that the model sends; on duplex wires, the client sends as many."""
    size: int
    """Bytes of each message."""
    start: float
    pace: float = 0.0
    """Seconds that the reader waits before each piece."""
    think: float = 0.0
    """Seconds that the model waits before each message."""
    pause: float = 0.0
    """Seconds that the writer waits before each piece."""
    chunked: bool = False
    """True if the request does not declare its length. Over HTTP/1.1 it then expects 100-continue."""
    both: bool = False
    """True if a duplex model also writes messages of its own while it reads."""
    silent_after: int | None = None
    """The client reads no more after so many messages; default None: it reads all."""
    leave: Leave = Leave.CLOSE
    leave_after: float | None = None
    patience: float = 200.0
    """Seconds after which the client gives up."""
    deceit: Deceit | None = None
    faults: ModelFaults | None = None

    @property
    def calm(self) -> bool:
        """Nothing goes wrong by this call itself."""
        rude = self.silent_after is not None or self.leave_after is not None
        return not rude and self.deceit is None and self.faults is None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LinePlan:
    """One connection."""

    name: str
    transport: str
    talks: tuple[TalkPlan, ...]
    network: NetworkProfile | None = None
    """None: a connection without a network between."""
    window: int = 16 * KiB

    @property
    def cut(self) -> bool:
        """True if the network stalls or ends the connection."""
        ways = (self.network.up, self.network.down) if self.network is not None else ()
        return any(w.cut_at is not None or w.reset_at is not None or w.stall_at is not None for w in ways)

    @property
    def calm(self) -> bool:
        """True if neither a call nor the network disturbs the whole connection."""
        rude = any(
            talk.deceit is Deceit.GARBAGE or (talk.leave_after is not None and talk.leave is not Leave.STREAM)
            for talk in self.talks
        )
        return not self.cut and not rude


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HostilePlan:
    """One connection of a client that means harm."""

    name: str
    hostility: Hostility
    transport: str
    start: float
    size: int
    """Bytes that it announces."""
    at_once: int
    """Pieces between two pauses."""
    pause: float
    patience: float = 60.0
    """When it goes away by itself."""


class Fate(enum.Enum):
    """A mishap of a process."""

    KILLED = "killed"
    CRASHED = "crashed"
    LEFT = "left"
    HUNG_UP = "hung up"
    STOPPED = "stopped"
    """The process is stopped for a time, and then goes on unless it was killed meanwhile."""
    NONSENSE = "nonsense"
    """The process sends bytes that are not a frame, or messages that it must not send."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Mishap:
    """A single mishap of one process of a model."""

    fate: Fate
    model: str
    number: int
    at: float | None
    """The time of the mishap; None: it depends on `frames`."""
    frames: int
    """The number of sent frames after which it happens."""
    lasts: float
    """Seconds for which a stopped process is stopped."""
    nonsense: bytes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Swizzle:
    """A subset of the connections is stopped one by one, and let go in another order."""

    at: float
    stop: tuple[tuple[float, str], ...]
    """The pause before each step, and the connection's name."""
    go: tuple[tuple[float, str], ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One whole run."""

    seed: int
    config: Config
    capacity: int
    """Bytes that each direction of a connection holds."""
    slots: int
    """The capacity of each model."""
    lines: tuple[LinePlan, ...]
    hostile: tuple[HostilePlan, ...] = ()
    crashes: tuple[tuple[float, str], ...] = ()
    """The time of each crash, and the model whose worker crashes."""
    instances: int = 1
    """The number of processes of each model in processes."""
    place: MemoryPlace = field(default_factory=MemoryPlace)
    """The behaviour of those processes."""
    hang_timeout: float = 0.0
    mishaps: tuple[Mishap, ...] = ()
    swizzles: tuple[Swizzle, ...] = ()
    drain_at: float = math.inf
    tight: bool = False
    """True if the byte budget is too small for all calls."""
    hub: bool = True

    @property
    def there(self) -> set[str]:
        """The models in processes that are called."""
        return {talk.model for line in self.lines for talk in line.talks if f"-{THERE}-" in talk.model}

    @property
    def unloading(self) -> float:
        """The seconds that unloading these models may take. They are unloaded one after the other. For each, the notice of
        its end counts, and for a stopped process the wait before it is killed."""
        stopped = {mishap.model for mishap in self.mishaps if mishap.fate is Fate.STOPPED}
        return sum(self.place.notice + _WAITED_FOR * (name in stopped) for name in sorted(self.there))

    @property
    def bound(self) -> int:
        """The most payload that may be on its way from one model to its client, beside the client's window."""
        limits = self.config.limits
        return limits.send_buffer + limits.connection_send_buffer + 4 * self.capacity + 4 * KiB


CALM, FAULTY = "a", "b"
"""The last letter of a model's name. The workers of FAULTY models crash, and their sessions have faults."""
THERE = "process"
"""The second word in the name of a model that runs in processes."""
KINDS = ("text", "tensor", "single", "parts")
"""The first word of a model's name. `single` sends one response to each request, `tensor` any number."""


def plan(seed: int, *, hub: bool = True) -> Plan:
    """Returns the plan of a seed."""
    chance = random.Random(f"simulate {seed}")
    tight, drains = chance.random() < 0.1, chance.random() < 0.25
    config = Config(
        listen=ListenConfig(port=-1, tls_port=-1),
        limits=LimitsConfig(
            total_bytes=(160 if tight else 8 * KiB) * KiB,
            body=160 * KiB,
            body_pool=64 * KiB,
            send_buffer=chance.choice((1, 4, 16)) * KiB,
            connection_send_buffer=16 * KiB,
            read_ahead=chance.choice((1, 8)) * KiB,
            write_stall=6.0,
            body_silence=8.0,
        ),
        http2=HTTP2Config(initial_window=chance.choice((2, 16)) * KiB, max_window=chance.choice((16, 64)) * KiB),
        websocket=WebSocketConfig(ping_interval=chance.choice((0.0, 4.0)), ping_timeout=4.0, close_timeout=3.0),
        bidi=BidiConfig(padding=chance.choice((0, 0, 40))),
        drain=DrainConfig(delay=chance.choice((0.0, 0.5)), timeout=chance.choice((0.0, 1.0, 3.0))),
    )
    lines = tuple(_line(chance, i, drains) for i in range(chance.randint(3, 9)))
    networked = [line.name for line in lines if line.network is not None]
    swizzles = tuple(_swizzle(chance, networked) for _ in range(chance.choice((0, 1, 2)) if networked else 0))
    crashes = tuple((chance.uniform(0, 3), f"{chance.choice(KINDS)}-{FAULTY}") for _ in range(chance.choice((0, 0, 1, 2))))
    return _with_processes(Plan(
        seed=seed, config=config, capacity=chance.choice((700, 4 * KiB, 16 * KiB)), slots=chance.choice((2, 8, 64)),
        lines=lines, hostile=_hostile(seed), crashes=tuple(sorted(crashes)), swizzles=swizzles,
        drain_at=chance.uniform(0.05, 4) if drains else math.inf, tight=tight,
        hub=hub and chance.random() < 0.8,
    ))  # fmt: skip


def _with_processes(chosen: Plan) -> Plan:
    """Moves some calls to models in processes, and adds mishaps to the processes of faulty models. It uses a separate source
    of chance, so that the other calls are the same with and without it."""
    chance = random.Random(f"processes {chosen.seed}")
    if chance.random() < 0.4:
        return chosen

    def moved(talk: TalkPlan) -> TalkPlan:
        kind, _, letter = talk.model.partition("-")
        if chance.random() < 0.4 or kind not in KINDS:
            return talk
        there = FAULTY if letter == CALM and chance.random() < 0.4 else letter  # then its process may have mishaps
        return replace(talk, model=f"{kind}-{THERE}-{there}")

    lines = tuple(replace(line, talks=tuple(map(moved, line.talks))) for line in chosen.lines)
    chosen, instances = replace(chosen, lines=lines), chance.choice((1, 2, 3))
    faulty = sorted(name for name in chosen.there if name.endswith(FAULTY))
    return replace(
        chosen,
        instances=instances,
        place=MemoryPlace(
            capacity=chance.choice((300, 4 * KiB, 64 * KiB)),
            piece=chance.choice((500, 4 * KiB, 64 * KiB)),
            rest=chance.choice((0.0, 0.0, 0.001)),
            notice=chance.choice((0.0, 0.0, 0.004, 0.05)),
        ),
        hang_timeout=chance.choice((0.4, 2.0)),
        mishaps=tuple(
            _mishap(chance, chance.choice(faulty), chance.randrange(instances))
            for _ in range(chance.choice((1, 2, 4, 8)) if faulty else 0)
        ),
    )


def _mishap(chance: random.Random, model: str, number: int) -> Mishap:
    return Mishap(
        fate=chance.choice(list(Fate)),
        model=model,
        number=number,
        at=chance.choice((None, chance.uniform(0, 3))),
        frames=chance.randint(1, 40),
        lasts=chance.choice((0.1, 1.0, 30.0)),
        nonsense=chance.choice(NONSENSE),
    )


_OPEN = range(1, 40)
NONSENSE = (
    b"\xff\xff\xff\xff",
    b"\x00\x00\x00\x01\xc1",
    b"\x00\x00\x00\x05\xdd\xff\xff\xff\xff",
    b"\x00\x00\x00\x04\x91\x92\x63\x01",
    *(b"".join(frames_of([encoded(message) for message in messages])) for messages in (
        [Ended(1_000_000)], [Ping(1)], [Text(1_000_000, "none", 0, None)], [Loaded(None, False, False)] * 2,
        [Credit(number, 1000, 0) for number in _OPEN], [Credit(number, 0, -1) for number in _OPEN],
        [Head(number, {}, False) for number in _OPEN for _ in range(2)],
    )),
)  # fmt: skip
"""Bytes that no process may send: the gateway kills a process that does."""


def _line(chance: random.Random, number: int, lasts: bool) -> LinePlan:
    transport = chance.choice(("http1", "http1", "http2", "http2", "websocket"))
    rude = chance.random() < 0.45
    many = {"http1": (1, 3), "http2": (1, 5), "websocket": (1, 1)}[transport]
    name = f"{transport}-{number}"
    network = _network(chance, rude)
    pieces = min(network.up.piece, network.down.piece) if network is not None else KiB
    talks = tuple(_talk(chance, f"{name}.{i}", transport, rude, pieces, lasts) for i in range(chance.randint(*many)))
    return LinePlan(
        name=name, transport=transport, talks=talks, network=network,
        window=chance.choice((1, 8, 64)) * KiB,
    )  # fmt: skip


def _hostile(seed: int) -> tuple[HostilePlan, ...]:
    """Returns the hostile clients of a seed. They have a separate source of chance, so that the other clients are the same
    with and without them."""
    chance = random.Random(f"hostile {seed}")
    number = chance.choice((0, 0, 1, 2))
    return tuple(
        HostilePlan(
            name=f"hostile-{i}",
            hostility=(hostility := chance.choice(list(Hostility))),
            transport=chance.choice(
                ("http1", "http2", "websocket") if hostility is Hostility.STOPS else ("http2", "websocket")
            ),
            start=chance.uniform(0, 2),
            size=chance.choice((100, 5000, 60_000)),
            at_once=chance.choice((1, 50, 1000)),
            pause=chance.choice((0.0005, 0.002)),
        )
        for i in range(number)
    )


_FORMS = {
    "http1": (
        Form.LMI,
        Form.LMI_JSON,
        Form.OPENAI,
        Form.INFER,
        Form.INFER_JSON,
        Form.INVOKE,
        Form.STREAM,
        Form.INFER_EVENTS,
        Form.INFER_FRAMES,
    ),
    "http2": (
        Form.LMI,
        Form.OPENAI,
        Form.INFER,
        Form.INVOKE,
        Form.INFER_FRAMES,
        Form.STREAM,
        Form.GRPC,
        Form.GRPC_STREAM,
        Form.GRPC_STREAM,
        Form.BIDI,
        Form.BIDI,
        Form.BIDI,
    ),
    "websocket": (Form.SOCKET,),
}


def _talk(chance: random.Random, name: str, transport: str, rude: bool, pieces: int, lasts: bool) -> TalkPlan:
    """Returns the plan of a call. `pieces` is the least number of bytes that arrive at once: if it is small, the messages
    are too. `lasts`: some calls take long, for a drain to find them."""
    form = chance.choice(_FORMS[transport])
    common: dict[str, Any] = {
        "name": name,
        "form": form,
        "messages": chance.choice((0, 1, 3, 8, 20)) if pieces >= 1000 else chance.choice((0, 1, 3)),
        "size": chance.choice((0, 10, 100, 900, 5000)) if pieces >= 1000 else chance.choice((0, 10, pieces)),
        "start": chance.choice((0.0, chance.uniform(0, 2))),
        "pace": chance.choice((0.0, 0.0, 0.003, 0.05)),
        "think": chance.choice((0.0, 0.03, 0.4, 0.4) if lasts else (0.0, 0.0, 0.0, 0.001, 0.03, 0.4)),
        "pause": chance.choice((0.0, 0.002, 0.02)),
        "chunked": chance.random() < 0.3,
        "both": chance.random() < 0.3,
    }
    if form in (Form.INFER_EVENTS, Form.INFER_FRAMES, Form.GRPC_STREAM):
        common["size"] = min(common["size"], 300)  # each response has as many numbers
    if common["messages"] * common["size"] > 20_000:
        common["pace"] = min(common["pace"], 0.003)  # even a slow reader must see the end
    calm = f"{form.model}-{CALM}"
    if form.kind == "text" and chance.random() < 0.2:
        calm = f"threads-{CALM}"
    fault = chance.choice(("model", "model", "leave", "silent", "lie")) if rude and chance.random() < 0.7 else ""
    more: dict[str, object] = {}
    match fault:
        case "model":
            more = {"model": f"{form.model}-{FAULTY}", "faults": _faults(chance), "patience": chance.uniform(2, 9)}
        case "leave":
            more = {
                "leave": chance.choice(list(Leave)), "leave_after": chance.choice((0.0, chance.uniform(0, 0.6))),
                "messages": chance.choice((3, 20, 300)) if pieces >= 1000 else 3,
            }  # fmt: skip
        case "silent":
            more = {
                "silent_after": chance.choice((0, 1, 5)), "patience": chance.uniform(1, 20),
                "messages": chance.choice((8, 100, 400)) if pieces >= 1000 else 8,
            }  # fmt: skip
        case "lie":
            more = {"deceit": chance.choice(list(Deceit)), "patience": chance.uniform(2, 9)}
        case _ if chance.random() < 0.2:
            more = {"model": f"{form.model}-{FAULTY}"}
    return TalkPlan(**{"model": calm, **common, **more})


def _faults(chance: random.Random) -> ModelFaults:
    at = chance.choice((0, 1, 2, 7))
    stubborn = chance.choice((0.0, 0.0, 0.7))
    match chance.choice(("raise", "error", "hang", "crash", "block", "lie")):
        case "raise":
            return ModelFaults(raise_at=at, stubborn=stubborn)
        case "error":
            return ModelFaults(error_at=at, stubborn=stubborn)
        case "hang":
            return ModelFaults(hang_at=at, stubborn=stubborn)
        case "crash":
            return ModelFaults(crash_at=at, stubborn=stubborn)
        case "block":
            return ModelFaults(block_at=at, stubborn=stubborn)
        case _:
            return ModelFaults(lie_at=at, lie=chance.choice(list(Lie)), stubborn=stubborn)


def _network(chance: random.Random, rude: bool) -> NetworkProfile | None:
    if chance.random() < 0.4:
        return None
    return NetworkProfile(up=_way(chance, rude), down=_way(chance, rude))


def _way(chance: random.Random, rude: bool) -> Way:
    piece = chance.choice((65536, 65536, 65536, 65536, 1000, 1000, 37, 1))
    delay = chance.choice((0.0, 0.002, 0.08))
    rate = chance.choice((math.inf, math.inf, 200_000.0, 30_000.0))
    at = chance.choice((chance.randint(0, 60), chance.randint(0, 700), chance.randint(0, 20_000)))
    match chance.choice(("cut", "reset", "stall", "", "", "", "")) if rude else "":
        case "cut":
            return Way(piece=piece, delay=delay, rate=rate, cut_at=at)
        case "reset":
            return Way(piece=piece, delay=delay, rate=rate, reset_at=at)
        case "stall":
            return Way(piece=piece, delay=delay, rate=rate, stall_at=at, stall=chance.choice((0.5, 4.0, 30.0)))
        case _:
            return Way(piece=piece, delay=delay, rate=rate)


def _swizzle(chance: random.Random, lines: list[str]) -> Swizzle:
    chosen = chance.sample(lines, chance.randint(1, len(lines)))
    stop = tuple((chance.uniform(0, 0.2), name) for name in chosen)
    chance.shuffle(chosen)
    return Swizzle(at=chance.uniform(0, 1.5), stop=stop, go=tuple((chance.uniform(0, 0.3), name) for name in chosen))
