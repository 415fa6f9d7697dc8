"""Behind the server: containers that send without end, and model folders that are hard to read or are replaced meanwhile."""

from __future__ import annotations

import base64
import hashlib
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from random import Random
from typing import Any

from benchmarks import requests
from tests.attacks.attack import attack
from tests.attacks.attacker import Attacker
from tests.attacks.ears import HTTP1Ear, WebSocketEar
from tests.attacks.programs.planes import Repeats

_LOADS: Any = {
    "settings": ("v2.model_control=true", "repository.roots={folder}/hub", "repository.code={folder}/hub"), "files": {"hub/note": ""}, "stop": 3.0,
    "lines": 100_000, "least": 2.0,
}  # fmt: skip
"""The log has a line for each load."""
_ANY: Any = {"stop": 3.0, "lines": 200_000, "least": 2.0}
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_SIZE = 32 * 1024
_CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def _for_ever(*pieces: bytes) -> Iterator[bytes]:
    """The last piece again and again, many at once."""
    *before, last = pieces
    yield from before
    last *= _SIZE // len(last) + 1
    while True:
        yield last


def _upgraded(head: bytes) -> bytes:
    """The answer to a WebSocket's handshake."""
    (key,) = (
        line.partition(b":")[2].strip() for line in head.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key:")
    )
    accept = base64.b64encode(hashlib.sha1(key + _GUID).digest())
    return b"HTTP/1.1 101 Up\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-accept: %b\r\n\r\n" % accept


def _is_upgrade(head: bytes) -> bool:
    return b"sec-websocket-key" in head.lower()


def interim_heads(random: Random, head: bytes) -> Iterator[bytes]:
    link = random.choice((b"", b"link: </%b>\r\n" % (b"x" * random.randint(1, 200))))
    return _for_ever(b"HTTP/1.1 %d Wait\r\n%b\r\n" % (random.choice((100, 102, 103, 199)), link))


def tiny_chunks(random: Random, head: bytes) -> Iterator[bytes]:
    if _is_upgrade(head):
        return _for_ever(_upgraded(head), b"\x02\x00" + b"\x00\x00" * random.randint(1, 40) + b"\x80\x01x")
    extension = random.choice((b"", b";a=b", b";" + b"x" * random.randint(1, 200)))
    return _for_ever(_CHUNKED, b"1%b\r\nx\r\n" % extension)


def endless_fields(random: Random, head: bytes) -> Iterator[bytes]:
    field = b"x-%d: %b\r\n" % (random.randint(0, 9), b"y" * random.randint(0, 100))
    if random.random() < 0.5 and not _is_upgrade(head):
        return _for_ever(_CHUNKED + b"1\r\nx\r\n0\r\n", field)
    return _for_ever(b"HTTP/1.1 200 OK\r\n", random.choice((field, b"\r", b"x")))


def empty_frames(random: Random, head: bytes) -> Iterator[bytes]:
    if not _is_upgrade(head):
        return _for_ever(_CHUNKED, b"%b1\r\n" % (b"0" * random.randint(1, 60)))
    ping, pong = b"\x89\x00", b"\x8a\x04late"
    frames = (ping, pong, b"\x89\x7d" + bytes(125), b"\x82\x00", b"\x81\x00", b"\x01\x00" + b"\x00\x00" * 20 + b"\x80\x00")
    return _for_ever(_upgraded(head), random.choice(frames))


def _ask(attacker: Attacker) -> None:
    """Calls and sessions of the model of that container, again as soon as they end: half the time of each kind."""
    unary = b"POST /models/behind/invoke HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1\r\n\r\nx"
    number, half = attacker.random.randint(4, 24), attacker.seconds / 2
    end = attacker.until
    attacker.until = end - half
    attacker.pour(lambda: Repeats(b"", unary, 1), HTTP1Ear, connections=number, every=0.1)
    attacker.until = end
    opening = requests.upgrade().replace(b" /invocations", b" /models/behind/invocations", 1)
    attacker.pour(lambda: Repeats(opening, requests.frame(b"x"), 1), WebSocketEar, connections=number, every=0.1)


@attack("container-1xx", behind=interim_heads, **_ANY)
def interim(attacker: Attacker) -> None:
    """A container that sends heads of status 1xx without end, in place of an answer and of a handshake's."""
    _ask(attacker)


@attack("container-chunks", nightly=True, behind=tiny_chunks, **_ANY)
def chunks(attacker: Attacker) -> None:
    """A container whose answers are chunks of one byte, with extensions, and fragments of one byte, without end."""
    _ask(attacker)


@attack("container-fields", nightly=True, behind=endless_fields, **_ANY)
def fields(attacker: Attacker) -> None:
    """A container whose heads or trailers have no end."""
    _ask(attacker)


@attack("container-frames", nightly=True, behind=empty_frames, **_ANY)
def frames(attacker: Attacker) -> None:
    """A container that sends Pings, Pongs and empty messages without end, and chunks whose length has no end."""
    _ask(attacker)


# Folders of models


def _load(attacker: Attacker, name: str) -> None:
    attacker.ask("POST", f"/v2/repository/models/{name}/load", b"{}")


def _load_all(attacker: Attacker, files: Sequence[tuple[str, str]]) -> None:
    """A folder of each file's name and text, loaded again and again, a few at once."""
    for number, (file, text) in enumerate(files):
        (attacker.folder / "hub" / f"m{number}").mkdir()
        (attacker.folder / "hub" / f"m{number}" / file).write_text(text)

    def again_and_again(seed: int) -> None:
        random = Random(seed)
        while attacker.goes_on:
            _load(attacker, f"m{random.randrange(len(files))}")

    _at_once(again_and_again, attacker.random)


def _at_once(what: Callable[[int], None], random: Random) -> None:
    threads = [threading.Thread(target=what, args=(random.randrange(1 << 30),)) for _ in range(random.randint(2, 6))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@attack("model-keys", ends="status 4..|open|young", **_LOADS)
def model_keys(attacker: Attacker) -> None:
    """Loads of folders whose model.toml has keys of up to tens of thousands of parts."""
    random, texts = attacker.random, []
    for _ in range(8):
        part = random.choice(("a", "'a'", '"a"', "a ", "-"))
        key = ".".join([part] * random.choice((random.randint(33, 200), random.randint(10_000, 40_000))))
        texts.append(random.choice(("%s = 1\n", "options.%s = 1\n", "[%s]\nx = 1\n", "options = { %s = 1 }\n")) % key)
    _load_all(attacker, [("model.toml", text) for text in texts])


@attack("model-values", nightly=True, ends="status 4..|open|young", **_LOADS)
def model_values(attacker: Attacker) -> None:
    """Loads of folders whose model.toml has deep arrays, long words and numbers, or as much of both as a file may have."""
    random, size = attacker.random, attacker.random.randint(100_000, 260_000)
    deep = random.randint(34, 50_000)
    texts = [
        "x = " + "[" * deep, "x = " + "[" * deep + "]" * deep, "x = " + "{ a = " * deep + "1" + "}" * deep,
        "x = " + "1" * size, "x = 0x" + "f" * size, "x = 1." + "0_1" * (size // 3), "x = '" + "y" * size + "'",
        "x = [" + "1," * (size // 2) + "]", "\n".join(f"a{number} = {{}}" for number in range(size // 12)),
        "\n".join(f"[[a.b{number}]]" for number in range(size // 14)), "#" * size, "\n" * size, '"' * size,
    ]  # fmt: skip
    _load_all(attacker, [("model.toml", text) for text in texts])


@attack("model-properties", nightly=True, ends="status 4..|open|young", **_LOADS)
def model_properties(attacker: Attacker) -> None:
    """Loads of folders whose serving.properties has thousands of lines, backslashes and names that lead nowhere."""
    size = attacker.random.randint(30_000, 70_000)
    texts = [
        "\\\n" * (size // 2), "\\u0041" * (size // 6), "engine=" + "x" * size, "=\n" * (size // 2),
        "\n".join(f"option.a{number}=1" for number in range(size // 14)), "option." + "a." * (size // 2) + "=1",
    ]  # fmt: skip
    _load_all(attacker, [("serving.properties", text) for text in texts])


_WHOLE = "async def model(prompt: str):\n    yield prompt\n"
_FOLDERS = (
    {"model.py": _WHOLE},
    {"model.py": _WHOLE, "model.toml": "capacity = 3\n"},
    {"model.py": "def model("},
    {"model.toml": "capacity = [\n"},
    {},
)


@attack("model-replaced", nightly=True, ends="status (200|4..|50[03])|open|young", **_LOADS)
def replaced(attacker: Attacker) -> None:
    """Loads and unloads of folders that others replace, cut short or remove meanwhile. A model.py with a mistake is a 500."""
    names = [f"r{number}" for number in range(attacker.random.randint(2, 5))]

    def replace(seed: int) -> None:
        random, number = Random(seed), 0
        while attacker.goes_on:
            number += 1
            place, aside = attacker.folder / "hub" / random.choice(names), attacker.folder / f"aside-{seed}-{number}"
            other = attacker.folder / f"other-{seed}-{number}"
            other.mkdir()
            for file, text in random.choice(_FOLDERS).items():
                (other / file).write_text(text)
            with suppress(OSError):
                place.rename(aside)
            with suppress(OSError):
                other.rename(place)
            shutil.rmtree(aside, ignore_errors=True)
            shutil.rmtree(other, ignore_errors=True)

    def load(seed: int) -> None:
        random = Random(seed)
        while attacker.goes_on:
            name = random.choice(names)
            _load(attacker, name)
            attacker.ask("POST", f"/v2/repository/models/{name}/unload", b"{}")

    replacing = [threading.Thread(target=replace, args=(attacker.random.randrange(1 << 30),)) for _ in range(2)]
    for thread in replacing:
        thread.start()
    _at_once(load, attacker.random)
    for thread in replacing:
        thread.join()
