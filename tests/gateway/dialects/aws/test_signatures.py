"""Signature Version 4 on the platform's routes: what is signed is served, what is not is refused, before and in the stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gateway.client.questions import bidirectional
from gateway.config import AccessConfig, Config
from gateway.testing.stories.talk import Leave
from models.messages import Part
from models.session import Session
from protocols.aws import bidi, sigv4
from protocols.events import Data, End, Request, Reset
from tests.gateway.promises import (
    SIGNER,
    EventsCall,
    House,
    Over,
    Probe,
    SignedCall,
    at_once,
    configured,
    raw,
    serving,
    silent,
)

INVOKE, STREAM = "/endpoints/probe/invocations", "/endpoints/probe/invocations-response-stream"
BIDI = "/endpoints/probe/invocations-bidirectional-stream"
BODY = b"the body"


async def echo(probe: Probe, session: Session[Any, Any]) -> None:
    async for part in session:
        probe.received.append(len(part.data))
        await session.send(Part(data=bytes(part.data)))


def on(**more: Any) -> Config:
    """Signatures are verified."""
    config = configured("bidi-signed", Config())
    sigv4_config = replace(config.sagemaker.sigv4, **more)
    return replace(config, sagemaker=replace(config.sagemaker, sigv4=sigv4_config))


def signed(path: str, *, signer: sigv4.Credentials = SIGNER, body: bytes = BODY, now: float = 0.0, **how: Any) -> Request:
    """A request with its signature."""
    payload = sigv4.STREAMING_EVENTS if path is BIDI else sigv4.payload_hash(body)
    kind = bidi.CONTENT_TYPE.encode() if path is BIDI else b"audio/wav"
    length = None if path is BIDI else len(body)
    head = raw(1, b"POST", path, headers=[(b"content-type", kind)], content_length=length).head
    given = sigv4.sign_request(head, signer, now=now or time.time(), payload=payload, **how)
    return raw(1, b"POST", path, headers=[*head.headers, *given.headers], content_length=length)


async def answered(house: House, head: Request, body: bytes = BODY, kind: str = "http2") -> tuple[int, str, str]:
    """Status, type and text of an answer."""
    line = house.line(kind)
    await line.send(head, *([Data(stream=1, buffers=(body,))] if body else []), End(stream=1))
    status, headers, said = await line.peer.read_answer(1)
    return status, headers.get(b"x-amzn-errortype", b"").decode(), said.decode(errors="replace")


@pytest.mark.parametrize("kind", ["http1", "http2"])
@pytest.mark.parametrize("path", [INVOKE, STREAM])
async def test_what_is_signed_is_served(path: str, kind: str, autojump_clock: Any) -> None:
    async with serving(Probe(echo).spec("bidi"), config=on()) as house:
        assert (await answered(house, signed(path), kind=kind))[0] == 200
        assert (await answered(house, signed(path, declare=False), kind=kind))[0] == 200
        assert (await answered(house, signed(path, body=b""), b"", kind))[0] == 200


WRONG: list[tuple[str, Callable[[str], Request], str]] = [
    ("no signature", lambda path: without(signed(path), b"authorization"), "MissingAuthenticationTokenException"),
    (
        "unknown key",
        lambda path: signed(path, signer=replace(SIGNER, access_key_id="AKIDNOBODY")),
        "UnrecognizedClientException",
    ),
    (
        "wrong secret",
        lambda path: signed(path, signer=replace(SIGNER, secret_access_key="no")),
        "InvalidSignatureException",
    ),
    ("long ago", lambda path: signed(path, now=time.time() - 1000), "InvalidSignatureException"),
    ("in the future", lambda path: signed(path, now=time.time() + 1000), "InvalidSignatureException"),
    (
        "another region",
        lambda path: signed(path, signer=replace(SIGNER, region="us-east-1")),
        "InvalidSignatureException",
    ),
    (
        "another service",
        lambda path: signed(path, signer=replace(SIGNER, service="s3")),
        "InvalidSignatureException",
    ),
    (
        "half of it",
        lambda path: edited(signed(path), b"authorization", b"AWS4-HMAC-SHA256 x"),
        "IncompleteSignatureException",
    ),
    (
        "a changed header",
        lambda path: edited(signed(path), b"content-type", b"text/plain"),
        "InvalidSignatureException",
    ),
]


def edited(request: Request, name: bytes, value: bytes) -> Request:
    head = request.head
    headers = [(n, value if n == name else v) for n, v in head.headers]
    return raw(1, b"POST", head.target.decode(), headers=headers, content_length=head.content_length)


def without(request: Request, name: bytes) -> Request:
    head = request.head
    headers = [h for h in head.headers if h[0] != name]
    return raw(1, b"POST", head.target.decode(), headers=headers, content_length=head.content_length)


@pytest.mark.parametrize("path", [INVOKE, STREAM, BIDI])
@pytest.mark.parametrize(("make", "code"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
async def test_what_is_not_is_refused_before_anything_else(
    make: Callable[[str], Request], code: str, path: str, autojump_clock: Any
) -> None:
    probe = Probe(silent)
    async with serving(probe.spec("bidi"), config=on(region=SIGNER.region)) as house:
        with at_once():
            found = await answered(house, make(path), b"" if path is BIDI else BODY)
        assert found[:2] == (403, code)
        assert SIGNER.secret_access_key not in found[2]
        assert (probe.calls, house.endings) == (0, {"refused": 1})


@pytest.mark.parametrize("declare", [True, False])
@pytest.mark.parametrize("path", [INVOKE, STREAM])
async def test_a_changed_body_is_refused_before_the_model_has_it(path: str, declare: bool, autojump_clock: Any) -> None:
    probe = Probe(echo)
    async with serving(probe.spec("bidi"), config=on()) as house:
        status, code, _ = await answered(house, signed(path, declare=declare), BODY[::-1])
        assert (status, probe.calls) == (403, 0)
        assert code


@pytest.mark.parametrize("size", [1024 * 1024 - 1, 1024 * 1024, 3 * 1024 * 1024])
async def test_a_large_body_is_hashed_beside_the_loop(size: int) -> None:  # on a real clock: a thread works
    body = bytes(size)
    async with serving(Probe(echo).spec("bidi"), config=on()) as house:
        assert (await answered(house, signed(INVOKE, body=body), body))[0] == 200
        assert (await answered(house, signed(INVOKE, body=body), body[1:] + b"x"))[0] == 403


async def test_a_signature_opens_no_other_route(autojump_clock: Any) -> None:
    async with serving(Probe(echo).spec("bidi"), config=replace(on(), access=AccessConfig())) as house:
        for path in ("/invocations", "/models/probe/invoke", "/v2/models/probe/infer"):
            line = house.line("http1")
            await line.send(signed(path), Data(stream=1, buffers=(BODY,)), End(stream=1))
            status, headers, body = await line.peer.read_answer(1)
            assert (status, headers.get(b"www-authenticate")) == (401, b'Bearer realm="everywire"'), body
            assert b"this server needs a signature or a certificate" in body
        assert (await house.ask("/ping", method=b"GET"))[0] == 200


async def test_a_containers_routes_are_its_platforms_where_that_is_said(autojump_clock: Any) -> None:
    assert on().access.unsigned
    async with serving(Probe(echo).spec("bidi"), config=on()) as house:
        assert (await house.ask("/invocations", BODY))[::2] == (200, BODY)
        assert (await house.ask("/models/probe/invoke", BODY))[0] == 200
        assert (await house.ask("/ping", method=b"GET"))[0] == 200
        call = await house.call("websocket")
        await call.leave(Leave.STREAM)


async def test_without_credentials_nobody_looks(autojump_clock: Any) -> None:
    async with serving(Probe(echo).spec("bidi")) as house:
        for head in (signed(INVOKE), WRONG[0][1](INVOKE), WRONG[2][1](INVOKE), WRONG[7][1](INVOKE)):
            assert (await answered(house, head))[0] == 200


async def test_the_literal_form_has_nothing_to_sign(autojump_clock: Any) -> None:
    async with serving(Probe(echo).spec("bidi"), config=on()) as house:
        head = raw(1, b"POST", BIDI, headers=[(b"content-type", bidi.JSON_CONTENT_TYPE.encode())]).head
        given = sigv4.sign_request(head, SIGNER, now=time.time(), payload=sigv4.STREAMING_EVENTS)
        line = house.line("http2")
        await line.send(raw(1, b"POST", BIDI, headers=[*head.headers, *given.headers]))
        status, _, body = await line.peer.read_answer(1)
        assert (status, b"where signatures are verified" in body) == (400, True)


# -- events ------------------------------------------------------------------------------------------------------------


class Forger(SignedCall):
    """Signs its events, the n-th of them in another way."""

    spoil: Any = None
    at = 2
    _sealed_so_far = 0

    def _sealed(self, event: bytes) -> Any:
        self._sealed_so_far += 1
        if self._sealed_so_far == self.at and self.spoil is not None:
            return self.spoil(self, event)
        return super()._sealed(event)

    def honest(self, event: bytes) -> Any:
        return super()._sealed(event)


def unsigned(forger: Forger, event: bytes) -> Any:
    return bidi.encode_envelope(event, date_ms=int(time.time() * 1000))


def other_bytes(forger: Forger, event: bytes) -> Any:
    date = int(time.time() * 1000)
    signature = forger._signer.sign(date, event)
    return bidi.encode_envelope(event[:-1] + b"x", date_ms=date, signature=signature)


def other_date(forger: Forger, event: bytes) -> Any:
    date = int(time.time() * 1000)
    return bidi.encode_envelope(event, date_ms=date + 1, signature=forger._signer.sign(date, event))


def bare(forger: Forger, event: bytes) -> Any:
    return [event]


def long_ago(forger: Forger, event: bytes) -> Any:
    date = int(time.time() * 1000) - 1_000_000
    return bidi.encode_envelope(event, date_ms=date, signature=forger._signer.sign(date, event))


def out_of_turn(forger: Forger, event: bytes) -> Any:
    forger._signer.sign(int(time.time() * 1000), b"an event that never was")
    return forger.honest(event)


def twice(forger: Forger, event: bytes) -> Any:
    once = list(forger.honest(event))
    return [*once, *once]


@pytest.mark.parametrize("spoil", [unsigned, other_bytes, other_date, bare, long_ago, out_of_turn, twice])
async def test_an_event_that_is_not_as_it_was_signed_ends_the_stream_in_band(spoil: Any, autojump_clock: Any) -> None:
    async def numbers(probe: Probe, session: Session[Any, Any]) -> None:
        async for part in session:
            probe.received.append(int(bytes(part.data[:8])))
            await probe.say(session)

    probe = Probe(numbers)
    async with serving(probe.spec("bidi-signed"), wire="bidi-signed") as house:
        forger = Forger(house.line("http2"), 1)
        await forger.open(bidirectional("probe"))
        await forger.say()
        assert await forger.next() == 0
        forger.spoil = spoil
        await forger.say()
        heard, over = await forger.rest()
        assert over.how == "error"
        if spoil is bare:
            assert over.code == "InternalStreamFailure"
        else:
            assert over.code.endswith("Exception")
        assert probe.received == ([0, 1] if spoil is twice else [0])
        assert heard == ([1] if spoil is twice else [])
        await forger.line.read()
        assert await forger.line.event(1) == Reset(stream=1, code=0), "the answer was whole"
        assert (house.endings, probe.live) == ({"refused": 1}, 0)


async def test_the_message_that_ends_the_input_is_signed_too(autojump_clock: Any) -> None:
    async def numbers(probe: Probe, session: Session[Any, Any]) -> None:
        async for part in session:
            probe.received.append(int(bytes(part.data[:8])))

    for spoil, how in [(None, "complete"), (unsigned, "error")]:
        probe = Probe(numbers)
        async with serving(probe.spec("bidi-signed"), wire="bidi-signed") as house:
            forger = Forger(house.line("http2"), 1)
            await forger.open(bidirectional("probe"))
            await forger.say()
            if spoil is not None:
                forger.spoil = unsigned
            await forger.hush()
            assert (await forger.rest())[1].how == how
            assert probe.received == [0]


async def test_an_unsigned_stream_is_refused_in_its_first_event_where_only_the_head_was_signed(autojump_clock: Any) -> None:
    probe = Probe(echo)
    async with serving(probe.spec("bidi-signed"), wire="bidi-signed") as house:
        call = EventsCall(house.line("http2"), 1)
        call.signed = lambda head: SignedCall.signed(call, head)  # type: ignore[arg-type,method-assign]
        await call.open(bidirectional("probe"))
        await call.say()
        _, over = await call.rest()
        assert (over.how, probe.received) == ("error", [])


async def test_json_events_are_signed_as_the_others_are(autojump_clock: Any) -> None:
    async with serving(Probe(echo).spec("bidi-signed"), wire="bidi-signed") as house:
        call = SignedCall(house.line("http2"), 1)
        await call.open(bidirectional("probe"))
        event = b"".join(bidi.encode_json_event(b"00000007"))
        await call.line.send(Data(stream=1, buffers=tuple(call._sealed(event))))
        assert await call.next() == 7
        await call.hush()
        assert await call.rest() == ([], Over("complete"))


async def test_two_streams_of_one_connection_have_a_chain_each(autojump_clock: Any) -> None:
    async with serving(Probe(echo).spec("bidi-signed"), wire="bidi-signed") as house:
        line = house.line("http2")
        calls = [await house.call("bidi-signed", line=line) for _ in range(3)]
        for number in range(5):
            for call in calls:
                assert isinstance(call, SignedCall)
                await call.say()
                assert await call.next() == number
        for call in calls:
            await call.leave(Leave.STREAM)
