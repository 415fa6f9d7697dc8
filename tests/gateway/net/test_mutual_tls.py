"""Client certificates: the model knows a client with a valid one, and a client without is refused alone."""

from __future__ import annotations

import logging
import shutil
import ssl
from pathlib import Path
from typing import Any

import pytest
import trio
from cryptography import x509

from gateway.config import TLSConfig
from gateway.config.problem import ConfigError
from gateway.gateway import Gateway
from gateway.net.certificate import read_client
from gateway.net.tls_context import server_context
from models.messages import Part, Prompt, Token
from models.session import ClientCertificate, Session
from tests.gateway.net.authority import DAY, Authority, Pair
from tests.gateway.net.over_tls import Stream, connect, secured, serving

NAMES = (x509.DNSName("batch.example.org"), x509.UniformResourceIdentifier("spiffe://example.org/batch"))
LOST = (trio.BrokenResourceError, trio.ClosedResourceError)


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@pytest.fixture
def server(ca: Authority) -> Pair:
    return ca.issue("server")


@pytest.fixture
def batch(ca: Authority) -> Pair:
    """The certificate of a client."""
    return ca.issue("batch", NAMES)


def settings(server: Pair, ca: Authority, **others: Any) -> TLSConfig:
    return TLSConfig(cert=str(server.cert), key=str(server.key), client_ca=str(ca.file), **others)


async def who(session: Session[Prompt, Token]) -> None:
    """Answers with whom it speaks to."""
    await session.receive()
    shown = session.call.client_certificate
    await session.send(Token(text=f"{shown.subject} {' '.join(shown.names)}" if shown else "nobody", id=1))


async def parts(session: Session[Part, Part]) -> None:
    shown = session.call.client_certificate
    await session.send(Part(data=shown.subject.encode() if shown else b"nobody"))


ASK = b'{"inputs": "who"}'


async def ask(stream: Stream) -> bytes:
    """The answer; empty where the server closes."""
    head = b"POST /predictions/who HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(ASK)
    await stream.send_all(head + ASK)
    answer = b""
    while b"\r\n\r\n" not in answer or not answer.endswith(b"}"):
        if not (received := await stream.receive_some()):
            break
        answer += received
    return answer.partition(b"\r\n\r\n")[2]


async def refused(gateway: Gateway, context: ssl.SSLContext) -> bool:
    """In TLS 1.3 a client's handshake is over before the server has looked at its certificate."""
    stream = await secured(gateway, context)
    try:
        await stream.do_handshake()
        return not await ask(stream)
    except LOST:
        return True
    finally:
        await trio.aclose_forcefully(stream)


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [vars(r)["reason"] for r in caplog.records if r.getMessage() == "connection not established"]


async def test_a_client_is_known_to_the_model_by_the_certificate_that_it_shows(
    ca: Authority, server: Pair, batch: Pair
) -> None:
    async with serving(settings(server, ca), who, parts) as gateway:
        stream = await connect(gateway, ca.client(batch))
        said = b"CN=batch,O=Example DNS:batch.example.org URI:spiffe://example.org/batch"
        assert said in await ask(stream)
        assert said in await ask(stream)  # on the same connection
        await trio.aclose_forcefully(stream)


async def test_it_is_known_on_a_websocket_too(ca: Authority, server: Pair, batch: Pair) -> None:
    async with serving(settings(server, ca), who, parts) as gateway:
        stream = await connect(gateway, ca.client(batch))
        await stream.send_all(
            b"GET /models/parts/invocations-bidirectional-stream HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
            b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        received = b""
        while b"CN=batch,O=Example" not in received:
            received += await stream.receive_some()
        await trio.aclose_forcefully(stream)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_who_shows_none_or_a_wrong_one_is_refused_alone_and_the_log_says_why(
    ca: Authority, server: Pair, batch: Pair, tmp_path: Path, version: ssl.TLSVersion, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    other = Authority(tmp_path / "other", "another CA")
    async with serving(settings(server, ca), who, parts) as gateway:
        neighbour = await connect(gateway, ca.client(batch))
        for shown in (None, other.issue("stranger"), ca.issue("late", begins=-3 * DAY, ends=-DAY)):
            client = ca.client(shown)
            client.maximum_version = version
            assert await refused(gateway, client)
        assert b"CN=batch" in await ask(neighbour)
        await trio.aclose_forcefully(neighbour)
    failed = "TLS handshake failed: "
    wrong = failed + "CERTIFICATE_VERIFY_FAILED: the peer's certificate is refused: "
    assert reasons(caplog) == [
        failed
        + "PEER_DID_NOT_RETURN_A_CERTIFICATE: the client has shown no certificate, and one is required (tls.client_ca)",
        wrong + "unable to get local issuer certificate (tls.client_ca)",
        wrong + "certificate has expired (tls.client_ca)",
    ]


async def test_where_it_is_optional_who_shows_none_is_nobody_and_a_wrong_one_is_refused(
    ca: Authority, server: Pair, batch: Pair, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path / "other", "another CA").issue("stranger")
    async with serving(settings(server, ca, client_certificate="optional"), who, parts) as gateway:
        for shown, said in ((None, b'"nobody"'), (batch, b"CN=batch")):
            stream = await connect(gateway, ca.client(shown))
            assert said in await ask(stream)
            await trio.aclose_forcefully(stream)
        assert await refused(gateway, ca.client(stranger))


async def test_where_nobody_is_asked_a_certificate_says_nothing(ca: Authority, server: Pair, batch: Pair) -> None:
    async with serving(TLSConfig(cert=str(server.cert), key=str(server.key)), who, parts) as gateway:
        stream = await connect(gateway, ca.client(batch))
        assert b'"nobody"' in await ask(stream)
        await trio.aclose_forcefully(stream)


async def test_other_authorities_hold_for_who_connects_after_the_reload(
    ca: Authority, server: Pair, batch: Pair, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other", "another CA")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(ca.file.read_bytes())
    tls = TLSConfig(cert=str(server.cert), key=str(server.key), client_ca=str(trusted))
    async with serving(tls, who, parts) as gateway:
        context = ca.client(batch)
        before = await connect(gateway, context)
        assert b"CN=batch" in await ask(before)
        trusted.write_bytes(other.file.read_bytes())
        await gateway.reload_certificate()
        assert b"CN=batch" in await ask(before)
        assert await refused(gateway, context)
        stream = await connect(gateway, ca.client(other.issue("newcomer")))
        assert b"CN=newcomer" in await ask(stream)
        trusted.write_bytes(b"")
        with pytest.raises(ConfigError, match=r"^tls\.client_ca: .*trusted\.pem holds no PEM certificate$"):
            await gateway.reload_certificate()
        assert b"CN=newcomer" in await ask(stream)
        for each in (before, stream):
            await trio.aclose_forcefully(each)


async def test_a_client_in_clear_is_told_apart_in_the_log(
    ca: Authority, server: Pair, batch: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(settings(server, ca), who, parts) as gateway:
        stream = await trio.open_tcp_stream("127.0.0.1", gateway.tls_port)
        await stream.send_all(b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n")
        while await stream.receive_some():
            pass
        await stream.aclose()
    assert reasons(caplog) == ["TLS handshake failed: HTTP_REQUEST: the client sent HTTP without TLS to the TLS port"]


@pytest.mark.programs
async def test_curl_shows_its_certificate(ca: Authority, server: Pair, batch: Pair) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("not installed: curl")
    async with serving(settings(server, ca), who, parts) as gateway:
        url = f"https://localhost:{gateway.tls_port}/predictions/who"
        command = [curl, "-sS", "--max-time", "20", "--http2", "--cacert", str(ca.file), "-d", ASK.decode(), url]
        shown = ["--cert", str(batch.cert), "--key", str(batch.key)]
        answered = await trio.run_process([*command, *shown], capture_stdout=True)
        assert b"CN=batch,O=Example" in answered.stdout
        alone = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
        assert alone.returncode != 0
        assert b"certificate required" in alone.stderr


# ---- errors in the files ----


def test_a_file_of_authorities_that_is_none_is_named(ca: Authority, server: Pair, tmp_path: Path) -> None:
    def complaint(client_ca: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            server_context(TLSConfig(cert=str(server.cert), key=str(server.key), client_ca=str(client_ca)))
        return str(caught.value)

    missing = tmp_path / "missing.pem"
    assert complaint(missing) == f"tls.client_ca: {missing} cannot be read: No such file or directory"
    for content in (b"", b"nothing", server.key.read_bytes()):
        missing.write_bytes(content)
        assert complaint(missing) == f"tls.client_ca: {missing} holds no PEM certificate"


def test_a_certificate_that_is_believed_itself_needs_nobody_above_it(ca: Authority, server: Pair, batch: Pair) -> None:
    context = server_context(TLSConfig(cert=str(server.cert), key=str(server.key), client_ca=str(batch.cert)))
    assert context.verify_flags & ssl.VERIFY_X509_PARTIAL_CHAIN
    assert context.verify_mode is ssl.CERT_REQUIRED


def test_a_certificate_that_cannot_be_read_has_its_fingerprint(ca: Authority, batch: Pair) -> None:
    der = x509.load_pem_x509_certificate(batch.cert.read_bytes())
    known = read_client(ssl.PEM_cert_to_DER_cert(batch.cert.read_text()))
    assert (known.issuer, known.serial) == ("CN=a test's CA", f"{der.serial_number:x}")
    assert read_client(b"abc") == ClientCertificate(
        fingerprint="ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
