"""Plain programs of grpcio, unmodified, with messages made by hand: statuses, retries, keepalive, health and keys."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.keys import line_of
from tests.interop import served_grpc
from tests.interop.grpc_frames import HEALTH, PATIENCE, SERVICE, infer_answer, infer_request, text_field
from tests.interop.servers import Server, serving

pytestmark = pytest.mark.usefixtures("grpcio")  # before any server: where grpcio is absent, none need start

INFER, STREAM, LIVE = f"{SERVICE}/ModelInfer", f"{SERVICE}/ModelStreamInfer", f"{SERVICE}/ServerLive"
INDEX = f"{SERVICE}/RepositoryIndex"
KEY, ONE_AT_ONCE, OPS, WRONG = ("ew_" + letter * 43 for letter in "kaow")


UNBOUNDED = {"grpc__max_send_message_length": -1}


@pytest.fixture(scope="module")
def grpcio(needs: Callable[[str, str], Any]) -> Any:
    return needs("grpcio", "grpc")


class Program:
    """A channel, by which bytes are sent as messages."""

    def __init__(self, grpcio: Any, server: Server, key: str = "", **options: Any) -> None:
        self.grpcio = grpcio
        self.metadata = [("authorization", f"Bearer {key}")] if key else []
        named = [(name.replace("__", "."), value) for name, value in options.items()]
        self.channel = grpcio.insecure_channel(f"{server.host}:{server.port}", options=named)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def ask(self, path: str, message: bytes = b"", **options: Any) -> bytes:
        """The one message of the answer."""
        metadata = [*self.metadata, *options.pop("metadata", ())]
        answer: bytes = self.channel.unary_unary(path)(message, metadata=metadata, **{"timeout": PATIENCE, **options})
        return answer

    def begin(self, path: str, message: bytes) -> Any:
        """The call, whose answer is its result(). It is cancelled when nobody has it any more."""
        return self.channel.unary_unary(path).future(message, metadata=self.metadata, timeout=PATIENCE)

    def infer(self, model: str, text: str, **options: Any) -> str:
        """The text that a model answers a text with."""
        return infer_answer(self.ask(INFER, infer_request(model, text), **options))

    def refused(self, path: str, message: bytes = b"", **options: Any) -> tuple[str, str]:
        """The name of the status that a call ends with, and its text."""
        with pytest.raises(self.grpcio.RpcError) as told:
            self.ask(path, message, **options)
        return told.value.code().name, told.value.details()


@pytest.fixture
def program(grpcio: Any, grpc_server: Server) -> Iterator[Program]:
    with Program(grpcio, grpc_server) as program:
        yield program


# ---- calls


@pytest.mark.by_default
def test_a_call_and_its_metadata(program: Program) -> None:
    metadata = (("x-text", "one"), ("x-data-bin", b"\0\1\xff"))
    told = json.loads(program.infer("headers", "", metadata=metadata))
    assert told["headers"]["x-text"] == "one"
    assert told["headers"]["x-data-bin"].encode("latin-1") == b"\0\1\xff"


def test_what_a_call_hears_before_and_after_its_message(program: Program) -> None:
    answer, call = program.channel.unary_unary(LIVE).with_call(b"", timeout=PATIENCE)
    assert answer == b"\x08\x01"
    assert call.code().name == "OK"
    assert "x-request-id" in dict(call.initial_metadata())


def test_an_unknown_method_is_named(program: Program) -> None:
    for path in (f"{SERVICE}/Nothing", "/other.Service/Method"):
        status, text = program.refused(path)
        assert status == "UNIMPLEMENTED"
        assert path in text


@pytest.mark.parametrize("kind", ["Gzip", "Deflate"])
def test_compressed_messages(program: Program, grpcio: Any, kind: str) -> None:
    text = "compressed " * 1000
    compression = getattr(grpcio.Compression, kind)
    assert json.loads(program.infer("headers", text, compression=compression))["parameters"] == {}
    name = f"{kind}{'x' * 10_000}"
    assert program.infer("refusing", f"{name} 0", compression=compression) == "1"


def test_large_metadata_is_read_or_refused_and_the_connection_goes_on(program: Program) -> None:
    told = json.loads(program.infer("headers", "", metadata=[("x-large", "x" * 20_000)]))
    assert len(told["headers"]["x-large"]) == 20_000
    status, _ = program.refused(LIVE, metadata=[("x-large", "x" * 40_000)])
    assert status == "RESOURCE_EXHAUSTED"
    assert program.ask(LIVE) == b"\x08\x01"


def test_over_tls(grpcio: Any, grpc_server: Server) -> None:
    # its TLS takes no CA that is constrained to addresses, as the development one is
    trusted = grpcio.ssl_channel_credentials(grpc_server.ca.with_name("server.pem").read_bytes())
    with grpcio.secure_channel(f"localhost:{grpc_server.tls_port}", trusted) as channel:
        assert channel.unary_unary(LIVE)(b"", timeout=PATIENCE) == b"\x08\x01"


def test_a_message_over_the_limit_is_refused_while_it_is_sent(grpcio: Any, tmp_path: Path) -> None:
    settings = ["limits = { body = 1_000_000 }", *served_grpc.models()]
    with serving(tmp_path, "served_grpc.py", settings) as server, Program(grpcio, server, **UNBOUNDED) as program:
        for compression in (grpcio.Compression.NoCompression, grpcio.Compression.Gzip):
            status, text = program.refused(INFER, bytes(50_000_000), compression=compression)
            assert status == "RESOURCE_EXHAUSTED"
            assert "limits.body" in text
            assert program.ask(LIVE) == b"\x08\x01"


def test_a_program_that_cancels_stops_its_model(program: Program) -> None:
    call = program.begin(INFER, infer_request("waiting", "program"))
    program.infer("tells", "begun program")
    assert call.cancel()
    assert program.infer("tells", "cancelled program") == "cancelled program"


def test_a_deadline_stops_a_model(program: Program) -> None:
    assert program.refused(INFER, infer_request("waiting", "hasty"), timeout=2)[0] == "DEADLINE_EXCEEDED"
    assert program.infer("tells", "cancelled hasty") == "cancelled hasty"
    assert program.refused(INFER, infer_request("refusing", "over 0"), timeout=-1)[0] == "DEADLINE_EXCEEDED"
    assert program.infer("tried", "over") == "0"


def test_a_program_that_is_gone_stops_its_models(program: Program, grpcio: Any, grpc_server: Server) -> None:
    with Program(grpcio, grpc_server) as other:
        call = other.begin(INFER, infer_request("waiting", "gone"))
        program.infer("tells", "begun gone")
    assert call.code().name == "CANCELLED"
    assert program.infer("tells", "cancelled gone") == "cancelled gone"


# ---- retries (gRFC A6)


def policy(**more: Any) -> str:
    retry = {
        "maxAttempts": 4, "initialBackoff": "0.01s", "maxBackoff": "0.1s", "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }  # fmt: skip
    return json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": retry | more}]})


def test_what_is_unavailable_is_tried_again(program: Program, grpcio: Any, grpc_server: Server) -> None:
    assert program.refused(INFER, infer_request("refusing", "once 1")) == ("UNAVAILABLE", "busy")
    with Program(grpcio, grpc_server, grpc__service_config=policy()) as patient:
        assert patient.infer("refusing", "later 2") == "3"
        assert patient.refused(INFER, infer_request("refusing", "never 9"))[0] == "UNAVAILABLE"
        assert patient.refused(INFER, infer_request("failing", "400"))[0] == "INVALID_ARGUMENT"
    assert [program.infer("tried", name) for name in ("once", "later", "never")] == ["1", "3", "4"]


def test_a_stream_that_is_refused_is_tried_again(program: Program, grpcio: Any, grpc_server: Server) -> None:
    with Program(grpcio, grpc_server, grpc__service_config=policy()) as patient:
        asked = iter([infer_request("refusing", "stream 2")])
        told = patient.channel.stream_stream(STREAM)(asked, metadata=[("triton_grpc_error", "true")], timeout=PATIENCE)
        assert len(list(told)) == 1
    assert program.infer("tried", "stream") == "3"


# ---- keepalive


def test_a_ping_each_second_is_nobodys_reason_to_end_a_connection(grpcio: Any, grpc_server: Server) -> None:
    often = {
        "grpc__keepalive_time_ms": 1000, "grpc__keepalive_timeout_ms": 20_000,
        "grpc__keepalive_permit_without_calls": 1, "grpc__http2__max_pings_without_data": 0,
    }  # fmt: skip
    with Program(grpcio, grpc_server, **often) as program:
        states: list[str] = []
        ready = threading.Event()

        def see(state: Any) -> None:
            states.append(state.name)
            if state.name == "READY":
                ready.set()

        program.channel.subscribe(see, try_to_connect=True)
        assert ready.wait(PATIENCE)
        # four pings or more; a server with C-core's strikes ends the connection after two, and the call with UNAVAILABLE
        assert program.refused(INFER, infer_request("waiting", "kept alive"), timeout=5)[0] == "DEADLINE_EXCEEDED"
        assert program.ask(LIVE) == b"\x08\x01"
        assert states[states.index("READY") :] == ["READY"]


# ---- health


def test_health_as_probes_ask_for_it(program: Program) -> None:
    for service in ("", "inference.GRPCInferenceService"):
        assert program.ask(f"{HEALTH}/Check", text_field(1, service)) == b"\x08\x01"
    status, text = program.refused(f"{HEALTH}/Check", text_field(1, "other.Service"))
    assert status == "NOT_FOUND"
    assert "other.Service" in text


def test_health_is_watched(program: Program) -> None:
    watch = program.channel.unary_stream(f"{HEALTH}/Watch")
    for service, status in (("", 1), ("other.Service", 3)):
        told = watch(text_field(1, service), timeout=PATIENCE)
        assert next(told) == bytes((8, status))
        told.cancel()


def test_health_tells_of_a_drain(grpcio: Any, tmp_path: Path) -> None:
    with serving(tmp_path, "served_grpc.py", served_grpc.models()) as server, Program(grpcio, server) as program:
        told = program.channel.unary_stream(f"{HEALTH}/Watch")(b"", timeout=PATIENCE)
        assert next(told) == b"\x08\x01"
        server.terminate()
        assert list(told) == [b"\x08\x02"]


def test_a_channel_that_checks_health_calls_what_serves(grpcio: Any, grpc_server: Server) -> None:
    def checked(service: str) -> str:
        balancing: Any = [{"round_robin": {}}]
        return json.dumps({"loadBalancingConfig": balancing, "healthCheckConfig": {"serviceName": service}})

    for service in ("", "inference.GRPCInferenceService"):
        with Program(grpcio, grpc_server, grpc__service_config=checked(service)) as program:
            assert program.ask(LIVE) == b"\x08\x01"
    with Program(grpcio, grpc_server, grpc__service_config=checked("other.Service")) as program:
        assert program.refused(LIVE)[0] == "UNAVAILABLE"


# ---- keys


@pytest.fixture(scope="module")
def keyed(grpcio: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("keyed")
    keys = folder / "keys.txt"
    lines = [
        line_of("alice", KEY, ["models=headers,waiting,tells,says"]),
        line_of("bob", ONE_AT_ONCE, ["in_flight=1"]),
        line_of("ops", OPS, ["scope=control"]),
    ]
    keys.write_text("\n".join(lines))
    keys.chmod(0o600)
    settings = [f'access = {{ keys_file = "{keys}" }}', "v2 = { model_control = true }", *served_grpc.models()]
    with serving(folder, "served_grpc.py", settings) as server:
        yield server


@pytest.mark.by_default
def test_a_key_opens_its_models(grpcio: Any, keyed: Server) -> None:
    with Program(grpcio, keyed, KEY) as alice:
        told = json.loads(alice.infer("headers", ""))
        assert told["party"] == "alice"
        assert "authorization" not in told["headers"]
        status, text = alice.refused(INFER, infer_request("failing", "400"))
        assert status == "PERMISSION_DENIED"
        assert "'failing'" in text
        assert alice.refused(INDEX)[0] == "PERMISSION_DENIED"
        assert alice.refused(f"{SERVICE}/ModelMetadata", text_field(1, "failing"))[0] == "PERMISSION_DENIED"
        every = alice.ask(f"{SERVICE}/ModelStatistics")
        assert (b"headers" in every, b"failing" in every) == (True, False)
    with Program(grpcio, keyed, OPS) as ops:
        assert b"failing" in ops.ask(INDEX)
    with Program(grpcio, keyed) as by_field:
        assert json.loads(by_field.infer("headers", "", metadata=[("x-api-key", KEY)]))["party"] == "alice"


def test_without_a_key_there_is_health_alone(grpcio: Any, keyed: Server) -> None:
    for key in ("", WRONG):
        with Program(grpcio, keyed, key) as nobody:
            for path in (
                INFER,
                STREAM,
                INDEX,
                f"{SERVICE}/ServerMetadata",
                f"{SERVICE}/ModelReady",
                "/other.Service/Method",
            ):
                assert nobody.refused(path)[0] == "UNAUTHENTICATED", path
    with Program(grpcio, keyed) as probe:
        assert probe.ask(LIVE) == b"\x08\x01"
        assert probe.ask(f"{HEALTH}/Check") == b"\x08\x01"


def test_a_key_of_another_model_in_a_stream(grpcio: Any, keyed: Server) -> None:
    with Program(grpcio, keyed, KEY) as alice:
        asked = iter([infer_request("failing", "400", "mine"), infer_request("headers", "", "yours")])
        told = list(alice.channel.stream_stream(STREAM)(asked, metadata=alice.metadata, timeout=PATIENCE))
        refusal, answer = sorted(told, key=len)
        assert b"mine" in refusal
        assert b"does not reach" in refusal
        assert b"yours" in answer


def test_a_key_has_so_many_calls_at_once(grpcio: Any, keyed: Server) -> None:
    with Program(grpcio, keyed, ONE_AT_ONCE) as bob, Program(grpcio, keyed, KEY) as alice:
        first = bob.begin(INFER, infer_request("waiting", "bob"))
        alice.infer("tells", "begun bob")
        status, text = bob.refused(INFER, infer_request("headers", ""))
        assert status == "RESOURCE_EXHAUSTED"
        assert "in_flight" in text
        alice.infer("says", "bob")
        assert infer_answer(first.result()) == "bob"
