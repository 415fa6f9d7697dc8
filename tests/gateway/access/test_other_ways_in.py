"""Certificates and signatures as ways in, alone and beside keys: one of those that are set is needed, and what is shown holds."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.config import Config, SigV4Config, TLSConfig
from gateway.core.connection import Connection
from gateway.errors import NotPermitted, TooManyRequests, Unauthenticated
from models.session import ClientCertificate
from protocols.aws import sigv4
from protocols.events import Head, Headers
from tests.gateway.access.asked import BEARER, KEY, WIRES, WRONG, alice, asking, config, keys_of

EVERY_WIRE = pytest.mark.parametrize("wire", WIRES)
SIGNER = sigv4.Credentials(access_key_id="AKIDEXAMPLE", secret_access_key="a secret of ours", region="eu-west-1")
BODY = b"the body"
INVOKE = "/endpoints/echo/invocations"


def certified(how: Any = "required", **access: Any) -> Config:
    return replace(config(**access), tls=TLSConfig(client_ca="authorities.pem", client_certificate=how))


def signing(folder: Path, file: str = "", **access: Any) -> Config:
    credentials = folder / "credentials"
    credentials.write_text(
        f"[a]\naws_access_key_id={SIGNER.access_key_id}\naws_secret_access_key={SIGNER.secret_access_key}\n"
    )
    chosen = config(file, **access)
    return replace(chosen, sagemaker=replace(chosen.sagemaker, sigv4=SigV4Config(credentials=str(credentials))))


def signed(*fields: tuple[bytes, bytes], path: str = INVOKE, signer: sigv4.Credentials = SIGNER) -> Headers:
    headers = [(b"content-type", b"audio/wav"), *fields]
    head = Head(method=b"POST", target=path.encode(), authority=b"localhost", headers=headers, content_length=len(BODY))
    given = sigv4.sign_request(head, signer, now=time.time(), payload=sigv4.payload_hash(BODY))
    return [*headers, *given.headers]


@EVERY_WIRE
async def test_without_a_required_certificate_health_alone_is_answered(wire: str, tmp_path: Path) -> None:
    async with asking(wire, certified()) as (_, ask):
        assert (await ask("GET", "/ping"))[0] == 200
        for method, path in (("GET", "/v2"), ("POST", INVOKE), ("GET", "/none")):
            status, _, body = await ask(method, path, (), BODY if method == "POST" else b"")
            assert (status, b"a signature or a certificate" in body) == (403 if path == INVOKE else 401, True)
    for open_to_all in (certified("optional"), certified(unsigned=True)):
        async with asking(wire, open_to_all) as (_, ask):
            assert (await ask("GET", "/v2"))[0] == 200
    file = keys_of(tmp_path, alice())
    async with asking(wire, replace(certified(), access=config(file).access)) as (_, ask):
        assert (await ask("GET", "/v2"))[0] == 401
        assert (await ask("GET", "/v2", BEARER))[0] == 200


@pytest.mark.parametrize("wire", ["http1", "http2"])
@pytest.mark.parametrize("how", ["required", "optional"])
async def test_a_certificate_opens_each_route_and_a_wrong_key_beside_it_does_not(
    wire: str, how: str, tmp_path: Path, monkeypatch: Any
) -> None:
    shown = ClientCertificate(subject="CN=batch", issuer="CN=ours", names=(), serial="1", fingerprint="f")
    monkeypatch.setattr(Connection, "client_certificate", property(lambda self: shown))
    file = keys_of(tmp_path, alice())
    chosen = signing(tmp_path, file)
    async with asking(wire, replace(chosen, tls=certified(how).tls)) as (_, ask):
        assert (await ask("GET", "/v2"))[0] == 200
        assert (await ask("POST", "/v2/repository/index", (), b"{}"))[0] == 200  # nothing is kept from it
        assert (await ask("POST", INVOKE, (), BODY))[0] == 200  # which needs no signature then
        assert (await ask("POST", INVOKE, signed(signer=replace(SIGNER, secret_access_key="x" * 8)), BODY))[0] == 403
        assert (await ask("GET", "/v2", ((b"x-api-key", WRONG.encode()),)))[0] == 401


@EVERY_WIRE
async def test_a_signature_opens_its_own_routes_and_a_key_beside_it_must_be_right_too(wire: str, tmp_path: Path) -> None:
    wrong = replace(SIGNER, secret_access_key="another secret")
    async with asking(wire, signing(tmp_path, keys_of(tmp_path, alice("models=echo")))) as (_, ask):
        for headers, expected, code in (
            (signed(), 200, None),
            (signed((b"x-api-key", KEY.encode())), 200, None),
            (BEARER, 200, None),
            (signed((b"x-api-key", WRONG.encode())), 403, b"UnrecognizedClientException"),
            (signed((b"x-api-key", KEY.encode()), signer=wrong), 403, b"InvalidSignatureException"),
            (signed(signer=wrong), 403, b"InvalidSignatureException"),
            ((), 403, b"MissingAuthenticationTokenException"),
        ):
            status, answered, body = await ask("POST", INVOKE, headers, BODY)
            assert (status, answered.get(b"x-amzn-errortype")) == (expected, code), body
        for path in ("/models/echo/invoke", "/invocations"):
            assert (await ask("POST", path, signed(path=path), BODY))[0] == 401
        other = "/endpoints/lm/invocations"
        refused = await ask("POST", other, signed((b"x-api-key", KEY.encode()), path=other), BODY)
        assert (refused[0], refused[1][b"x-amzn-errortype"]) == (403, b"AccessDeniedException")


async def test_signatures_alone_leave_the_other_routes_open_where_that_is_said(tmp_path: Path) -> None:
    async with asking("http1", signing(tmp_path)) as (_, ask):
        assert (await ask("GET", "/v2"))[0] == 401
        assert (await ask("POST", INVOKE, signed(), BODY))[0] == 200
    async with asking("http1", signing(tmp_path, unsigned=True)) as (_, ask):
        assert (await ask("GET", "/v2"))[0] == 200
        assert (await ask("POST", INVOKE, (), BODY))[0] == 403


def test_what_grpc_will_say_of_them() -> None:
    assert (Unauthenticated.grpc_status, NotPermitted.grpc_status, TooManyRequests.grpc_status) == (16, 7, 8)
