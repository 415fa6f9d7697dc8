"""The development certificate is whole, lasts, and is trusted for this machine alone; TLS is modern or not at all."""

from __future__ import annotations

import ssl
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from gateway.config import TLSConfig
from gateway.config.problem import ConfigError
from gateway.net.development_certificate import DevelopmentCertificate, default_directory, ensure
from gateway.net.tls_context import client_context, development_certificate, server_context

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
DAY = timedelta(days=1)
ROOT = Path(__file__).resolve().parents[3]


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, pkcs8, plain)


def certificate(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


# ---- the development certificate ----


def test_a_new_certificate_is_for_this_machine_and_signed_by_its_ca(tmp_path: Path) -> None:
    made = ensure(tmp_path / "deep" / "tls", now=NOW)
    server, ca = certificate(made.cert), certificate(made.ca)
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == ["localhost", "127.0.0.1", "::1"]
    assert made.expires == server.not_valid_after_utc == NOW + 30 * DAY
    assert ca.not_valid_after_utc == NOW + 365 * DAY
    for each in (server, ca):
        key = each.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        assert key.curve.name == "secp256r1"


def test_the_ca_can_vouch_for_nothing_else(tmp_path: Path) -> None:
    extensions = certificate(ensure(tmp_path, now=NOW).ca).extensions
    constraints = extensions.get_extension_for_class(x509.NameConstraints)
    assert constraints.critical
    assert [str(name.value) for name in constraints.value.permitted_subtrees or ()] == [
        "localhost",
        "127.0.0.1/32",
        "::1/128",
    ]
    assert extensions.get_extension_for_class(x509.BasicConstraints).value == x509.BasicConstraints(ca=True, path_length=0)


def test_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    made = ensure(tmp_path / "tls", now=NOW)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "tls").iterdir()}
    assert modes == {"ca.pem": 0o644, "ca-key.pem": 0o600, "server.pem": 0o644, "server-key.pem": 0o600, ".lock": 0o600}
    assert made.key.parent.stat().st_mode & 0o777 == 0o700


def test_a_second_start_uses_the_same_files(tmp_path: Path) -> None:
    first = ensure(tmp_path, now=NOW)
    before = contents(tmp_path)
    assert ensure(tmp_path, now=NOW + 28 * DAY) == first
    assert contents(tmp_path) == before


def test_a_certificate_in_its_last_day_is_replaced_under_the_same_ca(tmp_path: Path) -> None:
    first = ensure(tmp_path, now=NOW)
    ca = first.ca.read_bytes()
    second = ensure(tmp_path, now=NOW + 29 * DAY)
    assert second.expires == NOW + 59 * DAY
    assert second.ca.read_bytes() == ca
    certificate(second.cert).verify_directly_issued_by(certificate(second.ca))


def test_a_certificate_does_not_outlive_its_ca(tmp_path: Path) -> None:
    ensure(tmp_path, now=NOW)
    assert ensure(tmp_path, now=NOW + 355 * DAY).expires == NOW + 365 * DAY


def test_a_ca_in_its_last_day_takes_the_certificate_with_it(tmp_path: Path) -> None:
    first = ensure(tmp_path, now=NOW)
    ca = first.ca.read_bytes()
    second = ensure(tmp_path, now=NOW + 364 * DAY)
    assert second.ca.read_bytes() != ca
    certificate(second.cert).verify_directly_issued_by(certificate(second.ca))


def test_a_certificate_of_the_future_is_replaced(tmp_path: Path) -> None:
    ensure(tmp_path, now=NOW)
    assert ensure(tmp_path, now=NOW - 100 * DAY).expires == NOW - 70 * DAY


@pytest.mark.parametrize("name", ["ca.pem", "ca-key.pem", "server.pem", "server-key.pem"])
@pytest.mark.parametrize("damage", ["missing", "empty", "garbage", "of another"])
def test_a_missing_or_broken_file_is_made_good(tmp_path: Path, name: str, damage: str) -> None:
    ensure(tmp_path, now=NOW)
    file = tmp_path / name
    match damage:
        case "missing":
            file.unlink()
        case "empty":
            file.write_bytes(b"")
        case "garbage":
            file.write_bytes(b"-----BEGIN CERTIFICATE-----\n\xff\n-----END CERTIFICATE-----\n")
        case _:
            ensure(tmp_path / "other", now=NOW)
            file.write_bytes((tmp_path / "other" / name).read_bytes())
    made = ensure(tmp_path, now=NOW)
    handshake(made)


def test_a_certificate_for_other_names_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("gateway.net.development_certificate._NAMES", (x509.DNSName("localhost"),))
        ensure(tmp_path, now=NOW)
    handshake(ensure(tmp_path, now=NOW), name="127.0.0.1")


def test_a_folder_that_cannot_be_used_says_which_setting_names_another(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError) as caught:
        ensure(tmp_path / "file" / "tls", now=NOW)
    assert str(caught.value) == f"tls.dev_dir: cannot keep a certificate in {tmp_path}/file/tls: Not a directory"


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure(tmp_path, now=NOW)
    before = contents(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fchmod", fail)
    with pytest.raises(ConfigError, match="No space left on device"):
        ensure(tmp_path, now=NOW + 400 * DAY)
    assert contents(tmp_path) == before


@pytest.mark.programs
def test_two_processes_at_once_end_with_the_same_certificate(tmp_path: Path) -> None:
    program = (
        "import sys; from datetime import datetime, UTC; from pathlib import Path; from gateway.net.development_certificate import ensure\n"
        "made = ensure(Path(sys.argv[1]), now=datetime.fromtimestamp(1.8e9, UTC)); print(made.cert.read_text())"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "tls")], cwd=ROOT, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    results = {process.communicate(timeout=120)[0] for process in started}
    assert [process.returncode for process in started] == [0, 0, 0]
    assert results == {(tmp_path / "tls" / "server.pem").read_bytes() + b"\n"}


def test_the_folder_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_directory({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/everywire/tls")
    assert default_directory({"XDG_CACHE_HOME": "relative"}) == Path("/home/someone/.cache/everywire/tls")
    assert default_directory({}) == Path("/home/someone/.cache/everywire/tls")


def test_a_user_without_a_home_is_asked_for_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ConfigError, match=r"tls\.dev_dir must be set"):
        default_directory({})


# ---- contexts ----


@dataclass
class Side:
    """One end of a connection in memory."""

    tls: ssl.SSLObject
    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO
    done: bool = False

    @classmethod
    def of(cls, context: ssl.SSLContext, **arguments: object) -> Side:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        return cls(context.wrap_bio(incoming, outgoing, **arguments), incoming, outgoing)  # type: ignore[arg-type]

    def step(self) -> None:
        try:
            self.tls.do_handshake()
            self.done = True
        except ssl.SSLWantReadError:
            pass


def shake(server_side: ssl.SSLContext, client_side: ssl.SSLContext, name: str = "localhost") -> tuple[Side, Side]:
    server = Side.of(server_side, server_side=True)
    client = Side.of(client_side, server_hostname=name)
    for _ in range(6):
        client.step()
        server.incoming.write(client.outgoing.read())
        server.step()
        client.incoming.write(server.outgoing.read())
    assert server.done
    assert client.done
    return server, client


def handshake(made: DevelopmentCertificate, *, name: str = "localhost") -> tuple[Side, Side]:
    """Shakes hands without a check of times: OpenSSL uses the real clock, and the certificate was made at NOW."""
    client = client_context(made.ca)
    client.verify_flags |= ssl.VerifyFlags(0x200000)  # X509_V_FLAG_NO_CHECK_TIME
    return shake(server_context(TLSConfig(cert=str(made.cert), key=str(made.key))), client, name)


@pytest.fixture
def made(tmp_path: Path) -> DevelopmentCertificate:
    return ensure(tmp_path / "tls", now=NOW)


def files(made: DevelopmentCertificate) -> TLSConfig:
    return TLSConfig(cert=str(made.cert), key=str(made.key))


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1"])
def test_a_client_that_knows_the_ca_speaks_h2_over_tls_1_3(made: DevelopmentCertificate, name: str) -> None:
    server, client = handshake(made, name=name)
    assert server.tls.selected_alpn_protocol() == client.tls.selected_alpn_protocol() == "h2"
    assert client.tls.version() == "TLSv1.3"
    assert client.tls.compression() is None
    client.tls.write(b"hello")
    server.incoming.write(client.outgoing.read())
    assert server.tls.read() == b"hello"


def test_the_development_certificate_is_made_by_the_context_and_trusted_today(tmp_path: Path) -> None:
    config = TLSConfig(dev=True, dev_dir=str(tmp_path))
    server = server_context(config)
    shake(server, client_context(development_certificate(config).ca))


def test_the_context_makes_it_in_the_users_cache_where_no_folder_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    server_context(TLSConfig(dev=True), now=NOW)
    assert (tmp_path / "everywire" / "tls" / "ca.pem").exists()


def test_a_client_that_does_not_know_the_ca_refuses(made: DevelopmentCertificate, tmp_path: Path) -> None:
    other = ensure(tmp_path / "other", now=NOW)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(server_context(files(made)), client_context(other.ca))


def test_a_client_that_wanted_another_name_refuses(made: DevelopmentCertificate) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(made, name="example.org")


def test_a_name_outside_the_constraints_is_refused_though_the_ca_signed_it(tmp_path: Path) -> None:
    made = ensure(tmp_path, now=NOW)
    ca = certificate(made.ca)
    signer = serialization.load_pem_private_key((tmp_path / "ca-key.pem").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    forged = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + DAY)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("example.org")]), critical=True)
        .sign(signer, hashes.SHA256())
    )
    made.cert.write_bytes(forged.public_bytes(serialization.Encoding.PEM))
    made.key.write_bytes(pem(key))
    with pytest.raises(ssl.SSLCertVerificationError, match="permitted subtree violation"):
        handshake(made, name="example.org")


@pytest.mark.parametrize(
    ("offered", "chosen"), [(["http/1.1", "h2"], "h2"), (["http/1.1"], "http/1.1"), (["spdy/3"], None), ([], None)]
)
def test_h2_is_preferred_and_a_client_without_it_is_not_turned_away(
    made: DevelopmentCertificate, offered: list[str], chosen: str | None
) -> None:
    client = client_context(made.ca, alpn=offered)
    client.verify_flags |= ssl.VerifyFlags(0x200000)
    server, _ = shake(server_context(files(made)), client)
    assert server.tls.selected_alpn_protocol() == chosen


def test_every_cipher_is_aead_with_forward_secrecy(made: DevelopmentCertificate) -> None:
    for context in (server_context(files(made)), client_context(made.ca)):
        ciphers = context.get_ciphers()
        assert {cipher["protocol"] for cipher in ciphers} == {"TLSv1.2", "TLSv1.3"}
        assert all(cipher["aead"] for cipher in ciphers)
        assert all(cipher["kea"] in ("kx-ecdhe", "kx-any") for cipher in ciphers)


def test_tls_1_2_is_spoken_and_what_is_older_is_not(made: DevelopmentCertificate) -> None:
    server = server_context(files(made))
    assert server.minimum_version is ssl.TLSVersion.TLSv1_2
    client = client_context(made.ca)
    client.verify_flags |= ssl.VerifyFlags(0x200000)
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert shake(server, client)[0].tls.version() == "TLSv1.2"


def test_a_client_with_weak_ciphers_alone_is_turned_away(made: DevelopmentCertificate) -> None:
    client = client_context(made.ca)
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    client.set_ciphers("ECDHE-ECDSA-AES128-SHA256")
    with pytest.raises(ssl.SSLError, match=r"(?i)no.shared.cipher"):
        shake(server_context(files(made)), client)


def test_renegotiation_and_compression_are_off(made: DevelopmentCertificate) -> None:
    options = server_context(files(made)).options
    assert options & ssl.OP_NO_RENEGOTIATION
    assert options & ssl.OP_NO_COMPRESSION


# ---- errors in the files ----


def complaint(cert: Path | str, key: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        server_context(TLSConfig(cert=str(cert), key=str(key)))
    return str(caught.value)


def test_a_missing_file_is_named_with_its_setting(made: DevelopmentCertificate, tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    assert complaint(missing, made.key) == f"tls.cert: {missing} cannot be read: No such file or directory"
    assert complaint(made.cert, missing) == f"tls.key: {missing} cannot be read: No such file or directory"


def test_a_key_of_another_certificate_is_named(made: DevelopmentCertificate, tmp_path: Path) -> None:
    other = ensure(tmp_path / "other", now=NOW)
    assert complaint(made.cert, other.key) == f"tls.key: {other.key} is not the key of the first certificate in {made.cert}"


def test_a_file_that_holds_something_else_is_named(made: DevelopmentCertificate) -> None:
    assert complaint(made.key, made.key) == f"tls.cert: {made.key} holds no PEM certificate"
    assert complaint(made.cert, made.cert) == f"tls.key: {made.cert} holds no PEM private key"


def test_an_encrypted_key_is_named_and_nobody_is_asked_for_its_passphrase(made: DevelopmentCertificate) -> None:
    key = serialization.load_pem_private_key(made.key.read_bytes(), None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    made.key.write_bytes(encrypted)
    assert complaint(made.cert, made.key) == f"tls.key: {made.key} is encrypted: give a key without a passphrase"


def test_a_certificate_that_openssl_finds_too_weak_is_named(tmp_path: Path) -> None:
    key = rsa.generate_private_key(65537, 1024)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).serial_number(1).public_key(key.public_key())
    weak = builder.not_valid_before(NOW).not_valid_after(NOW + DAY).sign(key, hashes.SHA256())
    cert_file, key_file = tmp_path / "weak.pem", tmp_path / "weak-key.pem"
    cert_file.write_bytes(weak.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(pem(key))
    assert complaint(cert_file, key_file) == f"tls.cert: {cert_file} cannot be served: EE_KEY_TOO_SMALL"


def test_without_tls_there_is_no_context() -> None:
    with pytest.raises(ConfigError, match=r"^TLS is off: set tls\.cert and tls\.key, or tls\.dev$"):
        server_context(TLSConfig())


def test_a_client_is_told_of_a_ca_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_bytes(b"")
    for name in ("missing.pem", "empty.pem"):
        with pytest.raises(ConfigError, match=f"{name} cannot be used as a CA"):
            client_context(tmp_path / name)
