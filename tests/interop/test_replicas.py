"""Two gateways behind nginx and behind Envoy: every wire passes, nothing is gathered, and each is replaced under load."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio_websocket

from gateway.client import grpc_infer, infer
from gateway.client.sync import Client
from tests.interop.conftest import absent
from tests.interop.grpc_frames import SERVICE, infer_answer, infer_request
from tests.interop.replicas import FLOOD, Envoy, Front, Held, Load, Nginx, Replica, ask, of_a_page, replicas_in, until

CLIENT = "203.0.113.7"
KiB, MiB = 1 << 10, 1 << 20
STILL = 50
"""Looks, one after the other, at which a model that stands still has made nothing more."""


def found(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        absent(name)
    assert path is not None
    return path


@pytest.fixture(scope="module", params=["nginx", "envoy"])
def proxy(request: pytest.FixtureRequest) -> str:
    """Its program, which is there: no gateway is started for one that is not."""
    return found(request.param)


@pytest.fixture(scope="module")
def folder(proxy: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(Path(proxy).name)


@pytest.fixture(scope="module")
def replicas(folder: Path) -> Iterator[list[Replica]]:
    with replicas_in(folder) as replicas:
        yield replicas


@pytest.fixture(scope="module")
def front(proxy: str, folder: Path, replicas: list[Replica]) -> Iterator[Front]:
    front: Nginx | Envoy
    front = Nginx(proxy, folder, replicas) if Path(proxy).name == "nginx" else Envoy(proxy, folder, replicas)
    try:
        yield front
    finally:
        front.close()


def test_a_token_leaves_before_the_next_one_is_made(front: Front, tmp_path: Path) -> None:
    held = Held(front.port, tmp_path / "pipe")
    assert [held.say(word) for word in ("one", "two", "three")] == ["one", "two", "three"]
    assert held.end().endswith("three\n")
    held.close()


def test_a_client_that_stops_reading_stops_its_model_and_one_that_leaves_ends_it(front: Front, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.touch()
    # OpenAI's stream, whose end does not say the whole text again: nothing but what waits is held
    body = json.dumps({"model": "flood", "prompt": str(made), "stream": True, "max_tokens": 2 * FLOOD})
    with socket.socket() as client:
        client.settimeout(60)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * KiB)  # or the kernel makes it tens of MiB
        client.connect(("127.0.0.1", front.port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall((head + body).encode())
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        seen = [-1] * STILL

        def stands_still() -> bool:
            seen.append(made.stat().st_size)
            return len(set(seen[-STILL:])) == 1

        until(stands_still, "the model waits")
        assert b"E" not in made.read_bytes()
        assert made.stat().st_size < FLOOD / 2  # the sockets hold this much: a proxy that buffers would take all of it
    until(lambda: made.read_bytes().endswith(b"E"), "the model is told")


def test_an_upload_reaches_the_gateway_before_it_is_whole(front: Front, replicas: list[Replica]) -> None:
    with socket.create_connection(("127.0.0.1", front.port), 60) as client:
        head = f"POST /v2/models/identity/versions/1/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {4 * MiB}\r\n\r\n"
        client.sendall(head.encode() + bytes(MiB))

    def said() -> list[dict[str, Any]]:
        return [e for replica in replicas for e in replica.events("exchange") if "versions/1" in e["path"]]

    (line,) = until(said, "a gateway tells of the call")
    assert 0 < line["bytes_in"] <= MiB


def test_a_large_body_passes_in_both_directions(front: Front) -> None:
    with Client(f"http://127.0.0.1:{front.port}") as client:
        x = np.arange(8 * MiB, dtype=np.float32)
        (reply,) = client.call(infer({"INPUT0": x}, "identity", binary=True)).messages
        assert np.array_equal(reply["OUTPUT0"].array, x)


async def test_websockets_pass(front: Front) -> None:
    url = f"ws://127.0.0.1:{front.port}/models/echo/invocations-bidirectional-stream"
    with trio.fail_after(60):
        async with trio_websocket.open_websocket_url(url) as socket:
            for message in ("one", "two", "x" * 100_000):
                await socket.send_message(message)
                assert await socket.get_message() == message


def test_bidirectional_streams_pass_where_http2_does(front: Front) -> None:
    """They need HTTP/2 from end to end."""
    if isinstance(front, Nginx):
        pytest.skip("nginx speaks HTTP/1.1 to a gateway")
    with Client(f"http://127.0.0.1:{front.port}") as client, client.bidirectional("echo") as duplex:
        for word in (b"one", b"two", bytes(100_000)):
            duplex.send(word)
            assert duplex.receive() == word
        duplex.end()
        assert list(duplex) == []


def test_grpc_passes_to_our_client(front: Front) -> None:
    with Client(f"http://127.0.0.1:{front.grpc_port}") as client:
        x = {"INPUT0": np.array([1.5, 2.5], np.float32)}
        answer = client.call(grpc_infer(x, "identity"))
        assert answer.messages[0]["OUTPUT0"].elements.tolist() == [1.5, 2.5]
        (streamed,) = client.stream(grpc_infer(x, "identity", stream=True, id="7"))
        assert streamed.id == "7"


def test_grpc_passes_to_grpcio(front: Front, needs: Callable[[str, str], Any]) -> None:
    grpc = needs("grpcio", "grpc")
    with grpc.insecure_channel(f"127.0.0.1:{front.grpc_port}") as channel:
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60) == b"\x08\x01"
        call = channel.unary_unary(f"{SERVICE}/ModelInfer")
        assert infer_answer(call(infer_request("identity", "hello"), timeout=60)) == "hello"
        with pytest.raises(grpc.RpcError) as told:
            call(infer_request("nobody", "hello"), timeout=60)
        assert told.value.code().name == "NOT_FOUND"


def test_the_log_names_the_client_and_not_the_proxy(front: Front, replicas: list[Replica]) -> None:
    fields = {"X-Forwarded-For": CLIENT, "Forwarded": "for=6.6.6.6"}
    assert ask(front.port, "GET", "/v2", **fields)[0] == 200
    # every address is trusted here: the walk ends at the left end of the field, which the proxy has passed on
    until(
        lambda: any(e["peer"] == CLIENT for r in replicas for e in r.events("exchange") if e["path"] == "/v2"),
        "a line with the client's address",
    )


def test_a_page_is_the_servers_own_at_the_proxys_own_port_alone(front: Front) -> None:
    for name in ("127.0.0.1", "localhost"):
        assert of_a_page(front.port, name, f"http://{name}:{front.port}") == (200, 101)
        assert of_a_page(front.port, name, f"http://{name}") == (403, 403)  # another site: that of port 80


def test_each_is_replaced_under_load_and_nothing_is_lost(front: Front, replicas: list[Replica], tmp_path: Path) -> None:
    streams: dict[str, Held] = {}
    every: list[Held] = []
    try:
        while len(streams) < 2:  # until each gateway has one
            assert len(every) < 50, f"all of them at {streams.keys()}"
            every.append(Held(front.port, tmp_path / f"pipe{len(every)}"))
            streams.setdefault(every[-1].name, every[-1])
        with Load(front.port) as load:
            for replica in replicas:
                others = [other for other in replicas if other is not replica]
                stream = streams[replica.name]
                front.list(others)
                load.pass_by()  # requests that had chosen this gateway are answered
                replica.drain()
                assert stream.say("still here") == "still here"
                theirs = [held for held in every if held.name == replica.name]
                assert [held.end().split()[0] for held in theirs] == [replica.name] * len(theirs)
                status, report = replica.ended()
                assert (status, report["cut"]) == (0, [])
                load.pass_by()
                replica.start()
                front.list(replicas)
                load.pass_by()
        assert load.lost == []
    finally:
        for held in every:
            held.close()
