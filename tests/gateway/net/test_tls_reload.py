"""Another certificate takes the place of the one before while the server serves; a broken one does not."""

from __future__ import annotations

import logging
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trio
from cryptography.hazmat.primitives import serialization
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.config import Config, ListenConfig, TLSConfig
from gateway.config.problem import ConfigError
from gateway.gateway import Gateway
from gateway.net.tls_reload import ServedCertificate
from models.library.echo import Echo
from tests.gateway.net.authority import DAY, LOCAL, Authority, Pair
from tests.gateway.net.over_tls import Stream, connect, serving

ALIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@pytest.fixture
def served(tmp_path: Path, ca: Authority) -> Pair:
    """The files that are served."""
    pair = Pair(tmp_path / "served.pem", tmp_path / "served-key.pem")
    ca.issue("first").put(pair)
    return pair


def settings(served: Pair, **others: Any) -> TLSConfig:
    return TLSConfig(cert=str(served.cert), key=str(served.key), **others)


def shown(stream: Stream) -> str:
    """The common name of the certificate that the server has shown."""
    subject: Any = stream.getpeercert()["subject"]
    return str(dict(pair for (pair,) in subject)["commonName"])


async def alive(stream: Stream) -> bool:
    await stream.send_all(ALIVE)
    return (await stream.receive_some()).startswith(b"HTTP/1.1 200 ")


async def test_who_connects_is_shown_the_new_certificate_and_who_is_connected_goes_on(ca: Authority, served: Pair) -> None:
    async with serving(settings(served), Echo()) as gateway:
        client = ca.client()
        before = await connect(gateway, client)
        assert shown(before) == "first"
        assert await alive(before)
        ca.issue("second").put(served)
        told = await gateway.reload_certificate()
        assert told == gateway.certificate
        assert (told.subject, told.names) == ("CN=second,O=Example", ("DNS:localhost", "IP:127.0.0.1"))
        after = await connect(gateway, client)
        assert shown(after) == "second"
        assert await alive(before)
        assert await alive(after)
        for stream in (before, after):
            await trio.aclose_forcefully(stream)


def encrypted(pair: Pair) -> bytes:
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    secret = serialization.BestAvailableEncryption(b"secret")
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)


BREAK: dict[str, tuple[Callable[[Pair, Authority], object], str]] = {
    "an empty certificate": (lambda pair, ca: pair.cert.write_bytes(b""), "tls.cert: {cert} holds no PEM certificate"),
    "half a certificate": (
        lambda pair, ca: pair.cert.write_bytes(pair.cert.read_bytes()[:200]),
        "tls.cert: {cert} holds no PEM certificate",
    ),
    "no certificate": (lambda pair, ca: pair.cert.unlink(), "tls.cert: {cert} cannot be read: No such file or directory"),
    "a key that is none": (
        lambda pair, ca: pair.key.write_bytes(b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"),
        "tls.key: {key} holds no PEM private key",
    ),
    "the key of another": (
        lambda pair, ca: pair.key.write_bytes(ca.issue("other").key.read_bytes()),
        "tls.key: {key} is not the key of the first certificate in {cert}",
    ),
    "an encrypted key": (
        lambda pair, ca: pair.key.write_bytes(encrypted(pair)),
        "tls.key: {key} is encrypted: give a key without a passphrase",
    ),
}


@pytest.mark.parametrize("broken", BREAK)
async def test_what_cannot_be_served_is_named_and_the_certificate_before_stays(
    ca: Authority, served: Pair, broken: str
) -> None:
    destroy, complaint = BREAK[broken]
    async with serving(settings(served), Echo()) as gateway:
        first = gateway.certificate
        destroy(served, ca)
        with pytest.raises(ConfigError) as caught:
            await gateway.reload_certificate()
        assert str(caught.value) == complaint.format(cert=served.cert, key=served.key)
        assert gateway.certificate == first
        stream = await connect(gateway, ca.client())
        assert shown(stream) == "first"
        assert await alive(stream)
        await trio.aclose_forcefully(stream)
        ca.issue("second").put(served)
        assert (await gateway.reload_certificate()).subject == "CN=second,O=Example"


async def test_a_reload_that_is_cancelled_has_changed_nothing(ca: Authority, served: Pair) -> None:
    certificate = ServedCertificate(settings(served))
    before = certificate.context
    ca.issue("second").put(served)
    with trio.CancelScope() as scope:
        scope.cancel()
        await certificate.reload()
    assert scope.cancelled_caught
    assert (certificate.context, certificate.certificate.subject) == (before, "CN=first,O=Example")
    assert (await certificate.reload()).subject == "CN=second,O=Example"


async def test_a_reload_that_is_cancelled_while_its_thread_reads_has_changed_nothing(
    ca: Authority, served: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = ServedCertificate(settings(served))
    before = certificate.context
    ca.issue("second").put(served)
    with trio.CancelScope() as scope, monkeypatch.context() as patch:

        async def left(function: Callable[..., Any], **_: Any) -> None:
            function()
            scope.cancel()
            await trio.lowlevel.checkpoint()

        patch.setattr(trio.to_thread, "run_sync", left)
        await certificate.reload()
    assert scope.cancelled_caught
    assert certificate.context is before
    assert (await certificate.reload()).subject == "CN=second,O=Example"


async def test_where_no_tls_is_served_there_is_nothing_to_reload() -> None:
    gateway = Gateway(Config(listen=ListenConfig(port=0)), [Echo()])
    assert gateway.certificate is None
    with pytest.raises(ConfigError, match="TLS is not served"):
        await gateway.reload_certificate()


async def test_the_server_looks_at_its_files_by_itself(ca: Authority, served: Pair) -> None:
    async with serving(settings(served, reload_interval=0.01), Echo()) as gateway:
        client = ca.client()
        ca.issue("second").put(served)
        name = ""
        while name != "second":
            stream = await connect(gateway, client)
            name = shown(stream)
            await trio.aclose_forcefully(stream)


# ---- when the files are looked at ----


@pytest.fixture
def _without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    async def here(function: Callable[..., Any], **_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return function()

    monkeypatch.setattr(trio.to_thread, "run_sync", here)


@asynccontextmanager
async def watched(config: TLSConfig, **others: Any) -> AsyncIterator[ServedCertificate]:
    certificate = ServedCertificate(config, **others)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(certificate.watch)
        await wait_all_tasks_blocked()
        yield certificate
        nursery.cancel_scope.cancel()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "gateway.tls"]


LOADED, BROKEN = "certificate loaded", "the certificate cannot be reloaded: the previous one stays in use"


@pytest.mark.usefixtures("_without_threads")
async def test_a_certificate_whose_key_comes_later_is_served_with_it(
    ca: Authority, served: Pair, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    second = ca.issue("second")
    async with watched(settings(served)) as certificate:
        await trio.sleep(9)
        served.cert.write_bytes(second.cert.read_bytes())
        await trio.sleep(9)  # looked at once between the two
        served.key.write_bytes(second.key.read_bytes())
        await trio.sleep(9)  # and once behind
        assert (certificate.certificate.subject, said(caplog)) == ("CN=first,O=Example", [])
        await trio.sleep(9)
        assert (certificate.certificate.subject, said(caplog)) == ("CN=second,O=Example", [LOADED])
        await trio.sleep(100)
        assert said(caplog) == [LOADED]


@pytest.mark.usefixtures("_without_threads")
async def test_what_stays_broken_is_told_once_until_it_changes(
    ca: Authority, served: Pair, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with watched(settings(served)) as certificate:
        context = certificate.context
        ca.issue("second").cert.replace(served.cert)
        await trio.sleep(100)
        assert said(caplog) == [BROKEN]
        (record,) = [record for record in caplog.records if record.getMessage() == BROKEN]
        assert vars(record)["reason"] == f"tls.key: {served.key} is not the key of the first certificate in {served.cert}"
        assert certificate.context is context
        served.cert.write_bytes(b"worse")
        await trio.sleep(100)
        assert said(caplog) == [BROKEN, BROKEN]
        ca.issue("third").put(served)
        await trio.sleep(100)
        assert said(caplog) == [BROKEN, BROKEN, LOADED]
        assert certificate.context is not context


@pytest.mark.usefixtures("_without_threads")
async def test_a_link_that_leads_elsewhere_is_a_change(ca: Authority, tmp_path: Path, autojump_clock: MockClock) -> None:
    """As Kubernetes replaces the files of a secret."""
    data = tmp_path / "..data"
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        ca.issue(name).put(Pair(folder / "tls.crt", folder / "tls.key"))
    data.symlink_to("first")
    async with watched(settings(Pair(data / "tls.crt", data / "tls.key"))) as certificate:
        await trio.sleep(30)
        assert certificate.certificate.subject == "CN=first,O=Example"
        (tmp_path / "new").symlink_to("second")
        (tmp_path / "new").rename(data)
        await trio.sleep(30)
        assert certificate.certificate.subject == "CN=second,O=Example"


@pytest.mark.usefixtures("_without_threads")
async def test_whatever_a_file_holds_the_watch_goes_on(
    ca: Authority, served: Pair, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def surprised(*_: Any, **__: Any) -> None:
        raise RuntimeError("nobody thought of this")

    async with watched(settings(served)) as certificate:
        with monkeypatch.context() as patch:
            patch.setattr("gateway.net.tls_reload.server_context", surprised)
            ca.issue("second").put(served)
            await trio.sleep(100)
        assert said(caplog) == [BROKEN]
        ca.issue("third").put(served)
        await trio.sleep(100)
        assert certificate.certificate.subject == "CN=third,O=Example"


@pytest.mark.usefixtures("_without_threads")
async def test_the_development_certificate_is_renewed_in_its_last_day(tmp_path: Path, autojump_clock: MockClock) -> None:
    began = datetime.now(UTC)
    config = TLSConfig(dev=True, dev_dir=str(tmp_path / "dev"), reload_interval=3600)
    now = lambda: began + timedelta(seconds=trio.current_time())  # noqa: E731
    async with watched(config, now=now) as certificate:
        first = certificate.certificate
        await trio.sleep(28 * DAY.total_seconds())
        assert certificate.certificate == first
        await trio.sleep(DAY.total_seconds() + 3 * 3600)
        assert certificate.certificate.expires > first.expires + 28 * DAY
        shutil.rmtree(tmp_path / "dev")
        (tmp_path / "dev").write_bytes(b"")  # which is no folder
        await trio.sleep(DAY.total_seconds())


async def test_nobody_looks_where_the_interval_is_0(served: Pair) -> None:
    with trio.fail_after(60):
        await ServedCertificate(settings(served, reload_interval=0.0)).watch()


@pytest.mark.parametrize(("begins", "ends", "warned"), [(-DAY, DAY, 0), (-3 * DAY, -DAY, 1), (DAY, 2 * DAY, 1)])
def test_a_certificate_out_of_its_time_is_served_with_a_warning(
    ca: Authority, begins: timedelta, ends: timedelta, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    pair = ca.issue("dated", LOCAL, begins=begins, ends=ends)
    certificate = ServedCertificate(settings(pair))
    assert certificate.certificate.subject == "CN=dated,O=Example"
    assert len(said(caplog)) == warned
