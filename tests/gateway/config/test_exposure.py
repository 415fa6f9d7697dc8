"""Listeners that other machines reach: which settings are a mistake or a warning, and which show that they are intended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.cli.serve import make_gateway
from gateway.config import AccessConfig, Config, ListenConfig, SageMakerConfig, SigV4Config, TLSConfig, V2Config
from gateway.config.exposure import closes, warnings, wrong_access
from gateway.config.load import load
from gateway.config.problem import ConfigError
from gateway.gateway import Gateway

EVERYWHERE = ListenConfig(host="0.0.0.0")
KEYS = AccessConfig(keys_file="keys")
SIGNED = SageMakerConfig(sigv4=SigV4Config(credentials="credentials"))
CERTIFIED = TLSConfig(dev=True, client_ca="ca.pem")
MANAGED = V2Config(model_control=True)


def problems(**chosen: Any) -> list[str]:
    environ = chosen.pop("environ", {})
    return [problem.text for problem in wrong_access(Config(**chosen), environ)]


@pytest.mark.parametrize("managed", [{"v2": MANAGED}, {"sagemaker": SageMakerConfig(multi_model=True)}])
def test_nobody_manages_models_from_elsewhere_unless_somebody_has_said_so(managed: dict[str, Any]) -> None:
    (text,) = problems(listen=EVERYWHERE, **managed)
    assert "listen.host is '0.0.0.0', which others reach: everybody could load and unload models" in text
    assert "Set access.keys_file, or access.public = true where they may" in text
    assert problems(**managed) == []
    assert problems(listen=ListenConfig(host="unix:/run/served"), **managed) == []
    for said in ({"access": KEYS}, {"access": AccessConfig(public=True)}, {"tls": CERTIFIED}):
        assert problems(listen=EVERYWHERE, **managed, **said) == []
    assert problems(listen=EVERYWHERE, **managed, environ={"SAGEMAKER_MULTI_MODEL": "true"}) == []
    assert problems(listen=EVERYWHERE, **managed, environ={"SAGEMAKER_BIND_TO_PORT": "8080"}) == []


def test_a_signature_closes_the_other_routes_too_unless_that_is_said() -> None:
    assert closes(Config(sagemaker=SIGNED))
    assert not closes(Config(sagemaker=SIGNED, access=AccessConfig(unsigned=True)))
    assert closes(Config(tls=CERTIFIED))
    assert not closes(Config(tls=TLSConfig(dev=True, client_ca="ca.pem", client_certificate="optional")))
    assert not closes(Config(tls=CERTIFIED, access=AccessConfig(unsigned=True)))
    assert closes(Config(access=AccessConfig(keys_file="keys", unsigned=True)))


def test_pages_of_any_site_need_a_key_or_somebody_who_says_that_they_need_none() -> None:
    (text,) = problems(access=AccessConfig(origins=("*",)))
    assert text.startswith('access.origins has "*"')
    assert problems(access=AccessConfig(origins=("*",), keys_file="keys")) == []
    assert problems(access=AccessConfig(origins=("*",), public=True)) == []
    assert problems(access=AccessConfig(origins=("https://app.example",))) == []


def told(**chosen: Any) -> list[str]:
    environ = chosen.pop("environ", {})
    return [event for event, _ in warnings(Config(**chosen), environ)]


def test_a_server_that_everybody_may_call_says_so_at_its_start() -> None:
    everybody = ["everybody who reaches this server may call it"]
    assert told(listen=EVERYWHERE) == everybody
    assert told() == []
    for said in ({"access": KEYS}, {"access": AccessConfig(public=True)}, {"sagemaker": SIGNED}):
        assert told(listen=EVERYWHERE, **said) == []
    assert told(listen=EVERYWHERE, environ={"SAGEMAKER_BIND_TO_PORT": "8080"}) == []
    unsigned = AccessConfig(unsigned=True)
    assert told(sagemaker=SIGNED, access=unsigned) == ["access.unsigned admits clients without a signature or certificate"]
    assert told(tls=CERTIFIED, access=unsigned)[1:] == ["ports without TLS ask for no client certificate"]
    assert told(access=unsigned) == []


def test_it_is_told_wherever_a_configuration_is_taken(caplog: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"v2\.model_control \(--set v2\.model_control\) is true, and listen\.host"):
        load(file=None, environ={}, overrides={"v2.model_control": True, "listen.host": "0.0.0.0"})
    with pytest.raises(ConfigError, match=r"everybody could load and unload models"):
        Gateway(Config(listen=EVERYWHERE, v2=MANAGED))
    make_gateway(Config(listen=EVERYWHERE))
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "everybody who reaches this server may call it"
    ]


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("access.hosts", ["a b"], "a list of host names"),
        ("access.hosts", ["a:80"], "without a port"),
        ("access.origins", ["app.example"], "a list of origins"),
        ("access.origins", ["https://app.example/"], "a list of origins"),
        ("access.open", ["infer"], '"model-ready" and "metadata"'),
    ],
)
def test_a_list_of_what_cannot_be_is_refused(key: str, value: list[str], wanted: str) -> None:
    with pytest.raises(ConfigError, match="must be") as raised:
        load(file=None, environ={}, overrides={key: value})
    assert wanted in str(raised.value)
