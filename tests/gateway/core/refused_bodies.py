"""Refused bodies of every kind, and what a server that collects no garbage keeps of them.

    python -m tests.gateway.core.refused_bodies                # 100 of each of 64 MiB, which takes some minutes
    python -m tests.gateway.core.refused_bodies --number 20 --size 8 --only inflated

It prints how much larger the resident memory of the server is after that many refusals, and after twice as many, than it was
after the first three; then what the garbage collector finds.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import trio

from gateway.config import AccessConfig, Config, LimitsConfig, ListenConfig, SageMakerConfig, SigV4Config
from gateway.gateway import Gateway
from models.adapt import spec_of
from models.blocking import run_step
from models.errors import ModelError
from models.messages import Part, Prompt
from models.spec import Batching, ModelSpec
from protocols import v2
from protocols.aws import sigv4
from protocols.events import Head

MiB = 1024 * 1024
FEW = 3
"""Refusals that are made before the first look: allocators and pools have then what they keep."""
SIGNER = sigv4.Credentials(access_key_id="AKIDEXAMPLE", secret_access_key="a secret of ours", region="eu-west-1")
Fields = list[tuple[bytes, bytes]]


# -- models ------------------------------------------------------------------------------------------------------------


def length(x: npt.NDArray[np.object_]) -> npt.NDArray[np.int64]:
    return np.array([x.size])


def total(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return x.sum(keepdims=True)


def shout(prompt: Prompt) -> str:
    return prompt.text[:10].upper()


def speaking(part: Part) -> Part:
    return part


def failing(x: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    copied = x.copy()
    raise ZeroDivisionError(f"after {copied.size} bytes")


def refusing(x: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    copied = x.copy()
    try:
        raise KeyError("a cause")
    except KeyError as e:
        raise ModelError(f"not these {copied.size}") from e


async def failing_later(x: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    copied = x.copy()
    await trio.lowlevel.checkpoint()
    raise ZeroDivisionError(f"after {copied.size} bytes")


async def failing_beside(x: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    copied = x.copy()

    async def one() -> None:
        await run_step(lambda: copied[copied.size])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one)
    return x


async def failing_in_its_own_thread(x: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    copied = x.copy()
    try:
        await trio.to_thread.run_sync(lambda: copied[copied.size])  # a thread's exceptions are in reference cycles
    except IndexError as e:
        raise ZeroDivisionError(f"after {copied.size} bytes") from e
    return x


async def failing_as_it_leaves(x: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    try:
        await trio.sleep_forever()
    finally:
        with trio.CancelScope(shield=True):
            await failing_in_its_own_thread(x)


def specs() -> list[ModelSpec]:
    """The models that are asked."""
    batching = Batching(max_delay=0.001)
    alone = (length, total, shout, speaking, failing, refusing, failing_later, failing_beside)
    return [
        *(spec_of(model) for model in (*alone, failing_in_its_own_thread, failing_as_it_leaves)),
        spec_of(failing, "batched", max_batch_size=8, batching=batching),
        spec_of(refusing, "batched_refusing", max_batch_size=8, batching=replace(batching, retry=False)),
        spec_of(failing_in_its_own_thread, "batched_in_a_thread", max_batch_size=8, batching=batching),
    ]


# -- refused requests --------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Refused:
    """A request, and the status of its answer; 0 where its client leaves before that."""

    path: str
    body: bytes
    status: int
    fields: Fields = field(default_factory=list)
    chunked: bool = False


def infer(model: str) -> str:
    return f"/v2/models/{model}/infer"


def binary(array: Any, datatype: str, name: str = "x") -> tuple[Fields, bytes]:
    """Head fields and body of an inference request."""
    headers, body = v2.encode_infer_request([v2.V2Tensor(name=name, datatype=datatype, array=array)])
    return [given for given in headers if given[0] != b"content-length"], b"".join(body)


def numbers(count: int, last: str) -> bytes:
    data = ",".join(["1.5"] * count)
    return f'{{"inputs":[{{"name":"x","datatype":"FP32","shape":[{count + 1}],"data":[{data},{last}]}}]}}'.encode()


def strings(count: int) -> bytes:
    data = [*["abc"] * count, 1]
    return json.dumps({"inputs": [{"name": "x", "datatype": "BYTES", "shape": [count], "data": data}]}).encode()


def lying(count: int) -> Refused:
    """Elements of which the last is not so long as it says."""
    fields, body = binary(np.array([b"abc" * 20, b"de"] * count, object), "BYTES")
    return Refused(infer("length"), body[:-6] + b"\xff\xff\xff\x00de", 400, fields)


def of_a_model(name: str, status: int, shape: tuple[int, ...]) -> Refused:
    fields, body = binary(np.zeros(shape, np.uint8), "UINT8")
    return Refused(infer(name), body, status, fields)


def refusals(size: int) -> dict[str, Callable[[], Refused]]:
    """Each kind, for a server of `limits_of(size)`; text is an eighth of that and at most 8 MiB, as it takes longer to read."""
    coded, least = [(b"content-encoding", b"gzip")], min(size // 8, 8 * MiB)
    text, count = b"x" * least, min(least // 4, 150_000)

    def zeros(n: int) -> bytes:
        return gzip.compress(bytes(n))

    def over_budget() -> bytes:
        return gzip.compress(np.random.default_rng(0).bytes(size * 11 // 16) + bytes(size // 4), 1)

    wrong = b"its digest is of another body"

    def signed() -> Refused:
        body, path = bytes(min(size, 6 * MiB) // 2), "/endpoints/speaking/invocations"
        head = [(b"content-type", b"audio/wav"), (b"x-amz-content-sha256", sigv4.payload_hash(wrong).encode())]
        return Refused(path, body, 403, head)

    return {
        "an inflated body that is too large": lambda: Refused(infer("total"), zeros(size + 1), 413, coded),
        "a coding that is damaged at its end": lambda: Refused(infer("total"), zeros(size)[:-8] + bytes(8), 400, coded),
        "a coding that is cut off": lambda: Refused(infer("total"), zeros(size)[:-100], 400, coded),
        "an inflated body for which there is no memory": lambda: Refused(infer("total"), over_budget(), 503, coded),
        "an inflated body whose client has left": lambda: Refused(infer("total"), zeros(size), 0, coded),
        "an unknown coding": lambda: Refused(infer("total"), bytes(size), 415, [(b"content-encoding", b"br")]),
        "a body that is too large": lambda: Refused(infer("total"), bytes(size + 1), 413),
        "a body that grows too large": lambda: Refused(infer("total"), bytes(size + 1), 413, chunked=True),
        "a body of another digest": signed,
        "bad JSON of v2": lambda: Refused(infer("total"), b'{"id":"' + text, 400),
        "bad UTF-8 of v2": lambda: Refused(infer("total"), b'{"id":"' + text + b'\xff"}', 400),
        "numbers that are none": lambda: Refused(infer("total"), numbers(count, '"a"'), 400),
        "numbers out of range": lambda: Refused(infer("total"), numbers(count, "1e99"), 400),
        "too few numbers": lambda: Refused(
            infer("total"), numbers(count, "1").replace(b"%d" % (count + 1), b"%d" % (count + 2)), 400
        ),
        "strings that are none": lambda: Refused(infer("length"), strings(min(count, 50_000)), 400),
        "elements that lie": lambda: lying(min(count, 60_000)),
        "bad JSON of generate": lambda: Refused("/v2/models/shout/generate", b'{"text_input":"' + text, 400),
        "bad JSON of LMI": lambda: Refused("/invocations", b'{"inputs":"' + text, 424),
        "bad parameters of LMI": lambda: Refused("/invocations", b'{"inputs":"%s","parameters":{"top_k":"a"}}' % text, 424),
        "bad JSON of OpenAI's": lambda: Refused("/v1/completions", b'{"prompt":"' + text, 400),
        "bad members of OpenAI's": lambda: Refused(
            "/v1/chat/completions", b'{"messages":[{"role":"user","content":7}],"a":"%s"}' % text, 400
        ),
        "a platform's v2": lambda: Refused("/endpoints/total/invocations", numbers(count, '"a"'), 424),
        "a function that fails": lambda: of_a_model("failing", 500, (size // 4,)),
        "a function that refuses": lambda: of_a_model("refusing", 424, (size // 4,)),
        "an async function that fails": lambda: of_a_model("failing_later", 500, (size // 4,)),
        "a task of a model that fails": lambda: of_a_model("failing_beside", 500, (size // 4,)),
        "a function that fails in its own thread": lambda: of_a_model("failing_in_its_own_thread", 500, (size // 4,)),
        "a function that fails as it leaves": lambda: of_a_model("failing_as_it_leaves", 0, (size // 4,)),
        "a batch that fails": lambda: of_a_model("batched", 500, (2, size // 8)),
        "a batch that refuses": lambda: of_a_model("batched_refusing", 424, (2, size // 8)),
        "a batch that fails in its own thread": lambda: of_a_model("batched_in_a_thread", 500, (2, size // 8)),
    }


def limits_of(size: int) -> LimitsConfig:
    """The limits that the kinds go by."""
    return replace(
        LimitsConfig(), body=size, total_bytes=size * 3 // 2, party_share=100, memory_refuse=100, memory_reset=100
    )


def config_of(size: int, credentials: str) -> Config:
    """The limits, and signatures where they are looked at, with a key in that file."""
    Path(credentials).write_text(
        f"[a]\naws_access_key_id={SIGNER.access_key_id}\naws_secret_access_key={SIGNER.secret_access_key}\n"
    )
    verified = SageMakerConfig(sigv4=SigV4Config(credentials=credentials))
    return Config(
        listen=ListenConfig(host="127.0.0.1", port=0),
        limits=limits_of(size),
        sagemaker=verified,
        access=AccessConfig(unsigned=True),  # other routes are asked too
    )


def signature(request: Refused, authority: bytes) -> Fields:
    """The fields that the platform's routes want."""
    if not request.path.startswith("/endpoints/"):
        return request.fields
    given = dict(request.fields)
    payload = given.get(b"x-amz-content-sha256", b"").decode() or sigv4.payload_hash(request.body)
    head = Head(
        method=b"POST", target=request.path.encode(), authority=authority,
        headers=[f for f in request.fields if f[0] != b"x-amz-content-sha256"], content_length=len(request.body),
    )  # fmt: skip
    signed = sigv4.sign_request(head, SIGNER, now=time.time(), payload=payload)
    return [*head.headers, *signed.headers]


# -- the server, in a process of its own -------------------------------------------------------------------------------


async def _serve(size: int) -> None:
    gc.collect()
    gc.freeze()
    gc.disable()
    with tempfile.NamedTemporaryFile(suffix=".ini") as file:
        gateway = Gateway(config_of(size, file.name), models=specs())
        async with trio.open_nursery() as nursery:
            await nursery.start(gateway.serve)
            print(json.dumps({"port": gateway.port}), flush=True)
            stdin = trio.lowlevel.FdStream(os.dup(0))
            async for command in stdin:
                print(json.dumps(_found() if b"collect" in command else _looked(gateway)), flush=True)
            nursery.cancel_scope.cancel()


def _looked(gateway: Gateway) -> dict[str, Any]:
    counts = gateway.counts()
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"resident": resident, "reserved": counts.bytes_reserved, "live": counts.exchanges + counts.slots_in_use}


def _found() -> dict[str, Any]:
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    garbage, gc.garbage[:] = gc.garbage[:], []
    return {"found": kept_by(garbage)}


def kept_by(garbage: list[Any]) -> list[str]:
    """Garbage that the collector found: exceptions that know the frames they came through, and memory above 64 KiB."""
    said = [repr(one)[:200] for one in garbage if isinstance(one, BaseException) and one.__traceback__]
    for one in garbage:
        for held in (one, *gc.get_referents(one)):
            size = held.nbytes if isinstance(held, memoryview | np.ndarray) else 0
            if isinstance(held, bytes | bytearray | str):
                size = len(held)
            if size > 64 * 1024:
                said.append(f"{type(held).__name__} of {size} bytes in {type(one).__name__}")
    return said


@final
class Server:
    """A gateway in another process, whose garbage collector is off."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.port: int = self._read()["port"]

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server has ended"
        return json.loads(line)

    def _ask(self, command: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._read()

    def resident(self) -> int:
        """The server's resident memory, once nothing is under way and nothing reserved."""
        for _ in range(600):
            looked = self._ask("look")
            if not looked["reserved"] and not looked["live"]:
                return int(looked["resident"])
            time.sleep(0.1)
        raise AssertionError(f"something is left: {looked}")

    def found(self) -> list[str]:
        """The findings of its collector, after all."""
        return list(self._ask("collect")["found"])

    def refuse(self, request: Refused) -> None:
        """Makes a request, on a connection of its own."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        fields = {name.decode(): value.decode() for name, value in signature(request, b"127.0.0.1:%d" % self.port)}
        body: Any = iter([request.body]) if request.chunked else request.body
        if not request.chunked:
            fields["content-length"] = str(len(request.body))
        # a refusal before the body is read closes the connection on a client that may not be done yet
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.request("POST", request.path, body, fields, encode_chunked=request.chunked)
        if request.status:
            with suppress(ConnectionResetError):
                answer = connection.getresponse()
                said = answer.read()
                assert answer.status == request.status, (answer.status, said[:300])
        else:
            time.sleep(0.02)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        connection.close()


@contextmanager
def server(size: int) -> Iterator[Server]:
    """Runs a server for bodies of at most `size` bytes."""
    command = [sys.executable, "-m", "tests.gateway.core.refused_bodies", "--serve", str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as p:
        try:
            yield Server(p)
        finally:
            p.terminate()


def growth(served: Server, request: Refused, number: int) -> tuple[int, int]:
    """Bytes by which the server is larger after that many refusals, and after twice as many, than after a few."""
    grown = []
    for _ in range(FEW):
        served.refuse(request)
    before = served.resident()
    for _ in range(2):
        for _ in range(number):
            served.refuse(request)
        grown.append(served.resident() - before)
    first, second = grown
    return first, second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--number", type=int, default=100, help="refusals of each kind")
    parser.add_argument("--size", type=int, default=64, help="MiB of a body")
    parser.add_argument("--only", default="", help="kinds whose name has this")
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        trio.run(_serve, asked.serve)
        return
    with server(asked.size * MiB) as served:
        began = served.resident()
        print(f"{'refused':48} {'sent MiB':>9} {'after ' + str(asked.number):>12} {'after ' + str(2 * asked.number):>12}")
        for kind, make in refusals(asked.size * MiB).items():
            if asked.only in kind:
                request = make()
                first, second = growth(served, request, asked.number)
                sent = len(request.body) / MiB
                print(f"{kind:48} {sent:9.2f} {first / MiB:+8.1f} MiB {second / MiB:+8.1f} MiB", flush=True)
        print(f"the server began with {began / MiB:.1f} MiB resident and has {served.resident() / MiB:.1f} MiB")
        print("the collector finds", "; ".join(served.found()) or "nothing")


if __name__ == "__main__":
    main()
