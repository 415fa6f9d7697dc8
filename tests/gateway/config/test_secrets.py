"""Secrets, known by their name or their form, are masked in configuration, errors, log and operator plane."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.client import Peer, post
from gateway.config.fields import SETTINGS
from gateway.config.text import MASK, says_secret, text_without_secrets, without_secrets
from gateway.containers.connection import container_address
from gateway.operator.views import models_of
from gateway.telemetry.logging_setup import JSONFormatter, TextFormatter
from gateway.testing import memory_gateway
from models.messages import Family
from models.spec import ModelSpec, RestartPolicy

WORDS = (
    "pass", "passwd", "password", "passphrase", "pwd", "pat", "secret", "key", "token", "credential", "dsn", "cookie", "auth",
    "signature",
)  # fmt: skip
MASKED = [
    "db_pass", "PGPASSWORD", "pat", "github-pat", "secretkey", "secretKey", "SecretAccessKey", "client_secret_2", "hf_token",
    "hfToken", "APIKey", "API_KEYS", "api.key", "accesstoken", "refresh_tokens", "connection_string", "connectionString",
    "CONNECTIONSTRINGS", "Set-Cookie", "oauth", "Authorization", "x-amz-signature", "passphrase", "user_pwd", "sentry_dsn",
    "credentials", "credentials_json", "token", "tokens", "my_token_2", "keyring_key",
]  # fmt: skip
SHOWN = [
    "eos_token", "eosToken", "bos_token_id", "pad_token", "unk_token", "stop_token_ids", "special_tokens",
    "additional_special_tokens", "ignore_eos_token", "max_tokens", "max_new_tokens", "maxNewTokens", "min_tokens", "num_tokens",
    "max_rolling_batch_prefill_tokens", "maxtokens", "tokenizer", "path", "pattern", "patience", "author", "keyword", "passing",
    "tgi_compat", "keep_alive", "string", "connection", "", "_", "host",
]  # fmt: skip


@pytest.mark.parametrize("name", MASKED)
def test_a_name_that_says_secret_masks_all_under_it(name: str) -> None:
    assert says_secret(name)
    value = {"a": ["x", 5, 1.5, True, None, ""], name: {"user": "me"}}
    masked = {"a": [MASK, MASK, MASK, True, None, ""], name: {"user": MASK}}
    assert without_secrets(name, value) == without_secrets(("models", "m", "options", name), value) == masked
    assert without_secrets("options", {"x": {name: "abc"}, "y": "abc"}) == {"x": {name: MASK}, "y": "abc"}


@pytest.mark.parametrize("name", SHOWN)
def test_other_names_mask_nothing(name: str) -> None:
    assert not says_secret(name)
    assert without_secrets(name, ["x", 5, True, None]) == ["x", 5, True, None]


@given(st.sampled_from(WORDS), st.sampled_from(["", "s"]), st.sampled_from(["db_", "my-", "the", "x2_", ""]), st.data())
def test_a_word_says_so_in_any_spelling(word: str, plural: str, before: str, data: Any) -> None:
    name = before + word + plural
    spelt = data.draw(st.sampled_from([name, name.upper(), name.title(), f"{name}_file", f"{before}x{word.title()}"]))
    assert says_secret(spelt)


def test_of_the_settings_of_this_server_only_these_are_masked_by_name() -> None:
    masked = [path for path in SETTINGS if without_secrets(path, "/a/file") == MASK]
    assert masked == [("operator", "token"), ("access", "pass_credentials")]  # and that one is true or false


FORMS = [
    ("postgres://u:p@host:5432/db", f"postgres://{MASK}@host:5432/db"),
    ("redis://:pass@host", f"redis://{MASK}@host"),
    ("https://user@host/a@b", f"https://{MASK}@host/a@b"),
    ("mongodb://u:p@ss@host/x", f"mongodb://{MASK}@host/x"),
    ("redis://:pa/ss@host:6379/0", f"redis://{MASK}@host:6379/0"),
    ("amqp://u:p?a#b@host", f"amqp://{MASK}@host"),
    ("http://host:8080/a@b", "http://host:8080/a@b"),
    ("http://[::1]:8080/a@b", "http://[::1]:8080/a@b"),
    ("https://h/?api_key=x&y=1#token=z", f"https://h/?api_key={MASK}&y=1#token={MASK}"),
    ("https://h/a?X-Amz-Signature=1&X-Amz-Date=2", f"https://h/a?X-Amz-Signature={MASK}&X-Amz-Date=2"),
    ("https://h/a?api%5Fkey=1", f"https://h/a?api%5Fkey={MASK}"),
    ("https://h/c?sv=1&sig=abc%2F", f"https://h/c?sv=1&sig={MASK}"),
    ("https://h/?max_tokens=5&eos_token=x", "https://h/?max_tokens=5&eos_token=x"),
    ("host=h user=u password='a b' port=5", f"host=h user=u password='{MASK}' port=5"),
    ('AccountName=a;AccountKey="x=="; b', f'AccountName=a;AccountKey="{MASK}"; b'),
    ("run --api-key=abc --x=1", f"run --api-key={MASK} --x=1"),
    ("PASSWORD='open", f"PASSWORD='{MASK}'"),
    ("{'api_key': 'x', \"token\": 5, 'max_tokens': 5}", f"{{'api_key': '{MASK}', \"token\": {MASK}, 'max_tokens': 5}}"),
    ("Authorization: Bearer abc.def-~+/=", f"Authorization: Bearer {MASK}"),
    ("a -----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY----- b", f"a {MASK} b"),
    ("-----BEGIN CERTIFICATE-----\nMII", MASK),
    ("(eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc_-1)", f"({MASK})"),
    ("AKIAIOSFODNN7EXAMPLE", MASK),
    ("ASIAIOSFODNN7EXAMPLE.", f"{MASK}."),
    ("hf_abcdefghijkl", MASK),
    ("sk-proj-abcdefgh", MASK),
    ("ghp_abcdefghijkl and github_pat_abcdef_123", f"{MASK} and {MASK}"),
    ("xoxb-123456-abcdef", MASK),
    ("ew_abcdef123456", MASK),
    ("new_model, disk-space, risk-averse, half_open, a hf_ and a sk- alone", None),
    ("model lm failed: ValueError: x must be 5, not 'abc' (line 3)", None),
    ("a=b c=d e", None),
]


@pytest.mark.parametrize(("text", "masked"), FORMS)
def test_a_secret_is_known_by_its_form_under_any_name(text: str, masked: str | None) -> None:
    assert text_without_secrets(text) == (text if masked is None else masked)
    assert without_secrets("url", [text]) == [text if masked is None else masked]


@given(st.text() | st.from_regex(r"[a-z]{1,5}://[^\s]*@[a-z]*[?&=a-z'\"]*"))
def test_what_is_masked_stays_so(text: str) -> None:
    once = text_without_secrets(text)
    assert text_without_secrets(once) == once


PLAIN = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=8, max_size=30)


@given(PLAIN, PLAIN, st.sampled_from(WORDS), st.sampled_from(["{0}://u:{1}@h", "http://h/?{2}={1}&x={0}", "{2}='{1}' {0}"]))
def test_nothing_of_a_secret_is_left_and_what_is_none_stays(other: str, secret: str, word: str, form: str) -> None:
    secret = f"Z{secret}Z"
    shown = text_without_secrets(form.format(other, secret, word))
    assert secret not in shown
    assert other in shown or other.startswith("eyj")


@pytest.mark.parametrize(
    "piece", ["://a:", "'", '"', "eyJ", "a=", "-----BEGIN X-----", "https://x@", "\\", "token=", '"token":"', "?", "x" * 50]
)
def test_a_long_text_is_looked_at_once(piece: str) -> None:
    text = piece * (200_000 // len(piece))  # squares of this length would take minutes
    once = text_without_secrets(text)
    assert text_without_secrets(once) == once


# -- places that mask secrets -----------------------------------------------------------------------------------------

SECRET = "hunter2hunter2"
URL = f"postgres://me:{SECRET}@db.example/x"


@pytest.mark.parametrize("formatter", [JSONFormatter(), TextFormatter()])
@pytest.mark.parametrize("level", [logging.WARNING, logging.ERROR])
def test_a_line_of_the_log_that_says_what_went_wrong_masks_it(formatter: logging.Formatter, level: int) -> None:
    try:
        raise ConnectionError(f"no answer of {URL}")
    except ConnectionError as e:
        facts = {"reason": str(e), "tried": [URL]}
        record = logging.LogRecord("lib", level, __file__, 1, "failed: %s", (URL,), (type(e), e, e.__traceback__))
        record.__dict__.update(facts)
    line = formatter.format(record)
    assert SECRET not in line
    assert line.count("db.example") >= 4


@asynccontextmanager
async def _fails() -> AsyncIterator[Any]:
    raise ConnectionError(f"no answer of {URL}")
    yield


async def test_a_model_that_cannot_be_loaded_does_not_tell_its_options(autojump_clock: Any) -> None:
    spec = ModelSpec(name="lm", family=Family.TEXT, load=_fails, restart=RestartPolicy(intensity=0))
    async with memory_gateway([spec]) as served:
        (view,) = await models_of(served.gateway)
        told = [repr(view)]
        for path in ("/v2/models/lm/ready", "/v2/models/lm", "/v2/models/lm/generate"):
            told.append(await answered(served.http1(), path))
    assert "db.example" in told[0]
    for text in told:
        assert SECRET not in text


async def answered(peer: Peer, path: str) -> str:
    await peer.send(*post(1, path, json.dumps({"text_input": "x"}).encode(), [(b"content-type", b"application/json")]))
    status, headers, body = await peer.read_answer(1)
    peer.close()
    return f"{status} {headers} {body!r}"


def test_a_containers_url_that_is_refused_does_not_tell_its_password() -> None:
    for url in (f"ws://me:{SECRET}@h", f"ftp://me:{SECRET}@h", f"ws://me:{SECRET}@h:x"):
        with pytest.raises(ValueError, match="container URL") as refused:
            container_address(url)
        assert SECRET not in str(refused.value)
