"""Both paths of the WebSocket machine over the same random sequences: `python -m tests.protocols.websocket.websocket_paths`."""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence

from protocols.errors import ProtocolError
from protocols.events import NEED_DATA, Buffer, Close, ConnectionEnd, Opcode, Ping
from protocols.roles import Role
from protocols.websocket.connection import LARGE, WebSocketConnection, WebSocketLimits
from protocols.websocket.frames import MASKED, FrameMemory, mask, write_header

LENGTHS = [0, 1, 2, 5, 125, 126, 127, 399, 400, 401, 1024, 4095, 4096]
LONG = [16384, LARGE - 1, LARGE, LARGE + 3]
CLOSE_CODES = [0, 999, 1000, 1001, 1003, 1004, 1005, 1006, 1007, 1011, 1012, 1014, 1015, 1016, 2999, 3000, 4999, 5000, 65535]
TEXTS = ["", "plain", "später", "€uro", "\U0001f600\U0001f600", "a" * 130 + "é"]
LIMITS = {
    "part": [125, 1024, LARGE - 1, LARGE],
    "message": [10, 5000, 100000],
    "fragments": [1, 3],
    "check_utf8": [False, True],
    "send_buffer": [65536, 10],
}


class Memory(FrameMemory):
    """The memory of large frames by these functions."""

    def __init__(
        self,
        allocate: Callable[[int], bytearray | None] = bytearray,
        pay: Callable[[int], bool] = lambda n: True,
    ) -> None:
        self.allocate, self.pay_landing = allocate, pay  # type: ignore[method-assign]


def paths(rng: random.Random, role: Role) -> tuple[WebSocketConnection, WebSocketConnection]:
    """The machine on its own path and on wsproto's, alike in all else."""
    # most without limits that need a look at each frame: that is how a gateway runs it, and the fastest path
    rare = [name for name in LIMITS if rng.random() < 0.15]
    limits = WebSocketLimits(**{name: rng.choice(LIMITS[name]) for name in rare})  # type: ignore[arg-type]
    refusing = rng.random() < 0.1

    def machine(payload_path: bool) -> WebSocketConnection:
        keys = itertools.count(0x01020304, 0x11111)
        source = (lambda: (next(keys) & 0xFFFFFFFF).to_bytes(4, "big")) if role is Role.CLIENT else None
        allocate: Callable[[int], bytearray | None] = (lambda n: None) if refusing else bytearray
        return WebSocketConnection(role, limits, mask=source, memory=Memory(allocate), payload_path=payload_path)

    return machine(True), machine(False)


def payload(rng: random.Random) -> bytes:
    n = rng.choice(LENGTHS) if rng.random() < 0.97 else rng.choice(LONG)
    return rng.randbytes(min(n, 2000)) + bytes(max(0, n - 2000))


def wire(rng: random.Random, masked: bool) -> Iterator[bytes]:
    """Frames, most of them in turn and well-formed, so that sequences go deep; then anything at all."""
    within = False
    text = b""
    for _ in range(rng.choice([1, 3, 10, 30])):
        kind = rng.random()
        if kind < 0.2:
            first = rng.choice([0x89, 0x8A]) if rng.random() < 0.97 else rng.choice([0x09, 0x0A, 0x8B, 0x8F])
            body = rng.randbytes(rng.choice([0, 4, 124, 125]) if rng.random() < 0.97 else rng.choice([126, 127, 300]))
        elif kind < 0.23:
            first = rng.choice([0x88] * 9 + [0x08])
            code = rng.choice(CLOSE_CODES) if rng.random() < 0.7 else rng.randrange(65536)
            reason = rng.choice([b"", b"bye", "später".encode(), b"\xff", b"\xc3", bytes(123), bytes(124)])
            body = rng.choice([b"", b"\x03", code.to_bytes(2, "big") + reason, code.to_bytes(2, "big")])
        else:
            fin = rng.random() < 0.6
            if within:
                opcode = 0
            else:
                opcode = rng.choice([1, 2])
                text = rng.choice(TEXTS).encode() if opcode == 1 else b""
            if rng.random() < 0.01:
                opcode = rng.choice([0, 1, 2, 3, 7])
            cut = len(text) if fin else rng.randrange(len(text) + 1)
            body, text = (text[:cut], text[cut:]) if text else (payload(rng), b"")
            first, within = opcode | 0x80 * fin, not fin
        if rng.random() < 0.005:
            first ^= rng.choice([0x10, 0x20, 0x40])
        yield frame(rng, first, body, masked if rng.random() > 0.003 else not masked)
    if rng.random() < 0.2:
        yield rng.randbytes(rng.randrange(20))


def frame(rng: random.Random, first: int, body: bytes, masked: bool) -> bytes:
    flag, wrong = MASKED if masked else 0, rng.random()
    if wrong < 0.006 and not first & 8:
        body = bytes(rng.choice([125, 126]) if wrong < 0.003 else rng.choice([LARGE - 1, LARGE]))
    n = len(body)
    head = write_header(first, n, flag)
    if wrong < 0.003 and n < 65536:
        head = bytes((first, flag | 126)) + n.to_bytes(2, "big")
    elif wrong < 0.006:
        head = bytes((first, flag | 127)) + n.to_bytes(8, "big")
    elif wrong < 0.009:
        head = bytes((first, flag | 127)) + (n | rng.choice([1 << 63, 1 << 62, 1 << 40])).to_bytes(8, "big")
    key = rng.randbytes(4)
    return head + key + mask(body, key) if masked else head + body


def chunks(rng: random.Random, data: bytes) -> Iterator[bytes]:
    size = (
        rng.choice([1, 3, 50, 1000, 5000, 65536, 1 << 20]) if len(data) < 3000 else rng.choice([700, 5000, 65536, 1 << 20])
    )
    while data:
        n = rng.randrange(1, size + 1)
        yield data[:n]
        data = data[n:]


Step = Callable[[WebSocketConnection], object]


def receive(data: bytes, kind: Callable[[bytearray], Buffer]) -> Step:
    def step(machine: WebSocketConnection) -> object:
        view, landed = memoryview(data), []
        buffer = machine.get_buffer()
        if buffer is not None:
            n = min(len(buffer), len(view))
            buffer[:n] = view[:n]
            machine.buffer_updated(n)
            landed.append((len(buffer), n))
            view = view[n:]
        if len(view):
            # a caller uses its memory again once the machine has received it
            scratch = bytearray(view)
            machine.receive_data(kind(scratch))
            scratch[:] = bytes(len(scratch))
        return landed

    return step


def pull(at_most: int) -> Step:
    def step(machine: WebSocketConnection) -> object:
        events: list[object] = []
        for _ in range(at_most):
            event = machine.next_event()
            if event is NEED_DATA or event == ConnectionEnd():
                return [*events, event]
            events.append((event, ledger(machine)))
        return events

    return step


def write(at_most: int) -> Step:
    def step(machine: WebSocketConnection) -> object:
        buffers = machine.data_to_send(at_most)
        # buffers may be cut at different places: one path queues by reference, the other by copy
        return b"".join(buffers), bool(buffers), machine.data_sent()

    return step


def give_out(at_most: int) -> Step:
    return lambda machine: b"".join(machine.data_to_send(at_most))


def local(rng: random.Random) -> Step:
    """Something that our own side does, wise or not."""
    act = rng.randrange(11)
    if act < 4:
        opcode, fin, data = rng.choice(list(Opcode)), rng.random() < 0.7, payload(rng)
        cut = rng.randrange(len(data) + 1)
        parts: Sequence[Buffer] = rng.choice([(data,), (bytearray(data),), (data[:cut], memoryview(data)[cut:]), ()])
        return lambda machine: machine.send_frame(opcode, fin, parts)
    if act < 6:
        at_most = rng.choice([1, 7, 5000, 65536, 1 << 20])
        return rng.choice([write, write, write, give_out])(at_most)
    if act == 6:
        data = rng.randbytes(rng.choice([0, 4, 125, 126]))
        return lambda machine: machine.send(Ping(data=data))
    if act == 7 and rng.random() < 0.1:
        code, reason = rng.choice([None, *CLOSE_CODES]), rng.choice(["", "bye", "é" * 100, "\udcff"])
        return lambda machine: machine.send(Close(code=code, reason=reason))
    if act == 8 and rng.random() < 0.02:
        return rng.choice([lambda machine: machine.receive_eof(), lambda machine: machine.close()])
    if act == 9:
        return lambda machine: machine.data_sent()
    share = rng.choice([0, 1, 2, -1])
    return lambda machine: machine.credit(machine.unconsumed // share if share > 0 else -share * (machine.unconsumed + 1))


def ledger(machine: WebSocketConnection) -> object:
    buffer = machine.get_buffer()
    return (
        machine.unread, machine.unconsumed, machine.room(), machine.counters, machine.choked, machine.is_open, machine.closed,
        machine.close_sent, machine.close_received, machine.close_code, None if buffer is None else len(buffer),
    )  # fmt: skip


def outcome(machine: WebSocketConnection, step: Step) -> object:
    try:
        result = step(machine)
    except ProtocolError as error:
        result = type(error), str(error), getattr(error, "wire_code", None)
    return result, ledger(machine)


def run(rng: random.Random) -> list[object]:
    """One sequence through both paths; AssertionError at the first step where they differ. The outcomes, for whoever
    wants to know what was covered."""
    role = rng.choice(list(Role))
    ours, theirs = paths(rng, role)
    outcomes: list[object] = []

    def both(step: Step) -> None:
        result = outcome(ours, step)
        assert result == outcome(theirs, step), f"step {len(outcomes)}"
        outcomes.append(result)

    quiet, busy, eager = 0, rng.choice([0, 0.3, 0.5]), rng.choice([0.2, 0.7, 1])
    kinds: list[Callable[[bytearray], Buffer]] = [bytes, bytearray, memoryview]
    for chunk in chunks(rng, b"".join(wire(rng, role is Role.SERVER))):
        both(receive(chunk, rng.choice(kinds)))
        if ours.close_received or ours.close_code is not None:
            quiet += 1
        if quiet > 3:
            break  # nothing will be heard any more
        while rng.random() < busy:
            both(local(rng))
        if rng.random() < eager:
            both(pull(rng.choice([1, 2, 1000])))
    both(pull(1000))
    both(lambda machine: machine.data_sent())
    both(write(1 << 30))
    both(lambda machine: machine.receive_eof())
    both(pull(1000))
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    began, steps = time.perf_counter(), 0
    for i in range(arguments.examples):
        seed = f"{arguments.seed}:{i}"
        try:
            steps += len(run(random.Random(seed)))
        except AssertionError as error:
            raise SystemExit(f"seed {seed}: {error}") from error
    seconds = time.perf_counter() - began
    print(f"{arguments.examples} sequences, {steps} steps: no difference ({seconds:.1f} s)")


if __name__ == "__main__":
    main()
