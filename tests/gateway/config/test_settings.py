"""Settings come from a file, the environment and flags, and a wrong one says where it is and what it should be."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import re
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import BatchingConfig, Config, HTTP2Config, LimitsConfig, ModelConfig, RestartConfig, TensorConfig
from gateway.config.fields import NAMES, SETTINGS, Setting, setting_help, spelt
from gateway.config.load import Resolved, lines_of, load, resolve
from gateway.config.problem import ConfigError, Problem
from gateway.config.schema import json_schema
from gateway.config.show import to_json, to_toml
from gateway.config.text import MASK, dotted, parse_duration, parse_size, show, without_secrets
from gateway.config.tree import Unit
from models.spec import Batching, ModelSpec, RestartPolicy, TensorSpec
from protocols.http1.connection import HTTP1Limits
from protocols.http2.connection import HTTP2Limits
from tests.docs.pages import blocks

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def from_file(text: str, environ: Mapping[str, str] | None = None, **overrides: Any) -> Config:
    file = Path("everywire.toml")
    file.write_text(text, encoding="utf-8")
    return load(file=file, environ=environ or {}, overrides=overrides)


def from_environment(**environ: str) -> Config:
    return load(file=None, environ=environ, overrides={})


def from_flags(overrides: Mapping[str, Any]) -> Config:
    return load(file=None, environ={}, overrides=overrides)


def complaint(
    *, file: str = "", environ: Mapping[str, str] | None = None, overrides: Mapping[str, Any] | None = None
) -> str:
    path = None
    if file:
        path = Path("everywire.toml")
        path.write_text(file, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(file=path, environ=environ or {}, overrides=overrides or {})
    assert "\n" not in str(caught.value)
    return re.sub(r"everywire\.toml:[0-9]+", "everywire.toml", str(caught.value))


# ---- precedence ----


def test_without_any_source_everything_is_a_default() -> None:
    resolved = resolve(file=None, environ={"HOME": "/root", "PATH": "/bin"}, overrides={})
    assert resolved == Resolved(config=Config(), sources={})


def test_a_file_overrides_defaults_the_environment_the_file_and_a_flag_the_environment(directory: Path) -> None:
    file = directory / "everywire.toml"
    file.write_text("[listen]\nhost = '::1'\nport = 1\nbacklog = 1\n")
    environ = {"EVERYWIRE_LISTEN__PORT": "2", "EVERYWIRE_LISTEN__BACKLOG": "2"}
    resolved = resolve(file=file, environ=environ, overrides={"listen.backlog": "3"}, flags={"listen.backlog": "--backlog"})
    listen = resolved.config.listen
    assert (listen.host, listen.port, listen.backlog, listen.tls_port) == ("::1", 2, 3, 8443)
    assert resolved.sources == {
        "listen.host": f"{file}:2",
        "listen.port": "EVERYWIRE_LISTEN__PORT",
        "listen.backlog": "--backlog",
    }


def test_an_override_without_a_flag_of_its_own_was_made_by_set() -> None:
    resolved = resolve(file=None, environ={}, overrides={"listen.port": 9})
    assert resolved.sources == {"listen.port": "--set listen.port"}


def test_the_port_of_sagemaker_is_used_where_nothing_else_sets_one(directory: Path) -> None:
    sagemaker = {"SAGEMAKER_BIND_TO_PORT": "8099"}
    resolved = resolve(file=None, environ=sagemaker, overrides={})
    assert resolved.config.listen.port == 8099
    assert resolved.sources["listen.port"] == "SAGEMAKER_BIND_TO_PORT"
    assert from_file("[listen]\nport = 1", sagemaker).listen.port == 1
    assert from_environment(EVERYWIRE_LISTEN__PORT="2", **sagemaker).listen.port == 2
    assert load(file=None, environ=sagemaker, overrides={"listen.port": 3}).listen.port == 3
    assert from_environment(SAGEMAKER_BIND_TO_PORT="").listen.port == 8080


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("SAGEMAKER_BIND_TO_PORT", "http", "listen.port must be a whole number from -1 to 65535, not 'http'"),
        ("SAGEMAKER_MULTI_MODEL", "yes", "sagemaker.multi_model must be true or false, not 'yes'"),
    ],
)
def test_a_wrong_variable_of_sagemaker_is_named(variable: str, value: str, message: str) -> None:
    assert complaint(environ={variable: value}) == f"{variable}: {message}"


@pytest.mark.parametrize(("text", "served"), [("true", True), ("True", True), ("1", True), ("false", False), ("0", False)])
def test_sagemaker_asks_for_the_multi_model_api(text: str, served: bool) -> None:
    assert from_environment(SAGEMAKER_MULTI_MODEL=text).sagemaker.multi_model is served
    assert not from_environment(SAGEMAKER_MULTI_MODEL=text, EVERYWIRE_SAGEMAKER__MULTI_MODEL="0").sagemaker.multi_model


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SAGEMAKER_BIND_TO_PORT", "8080"),
        ("SAGEMAKER_MULTI_MODEL", "false"),
        ("SAGEMAKER_SAFE_PORT_RANGE", "9000-9999"),
    ],
)
def test_any_variable_of_sagemaker_makes_it_a_container_that_is_reached_and_stops_in_time(variable: str, value: str) -> None:
    resolved = resolve(file=None, environ={variable: value}, overrides={})
    assert (resolved.config.listen.host, resolved.config.drain.timeout) == ("0.0.0.0", 20.0)
    assert (resolved.sources["listen.host"], resolved.sources["drain.timeout"]) == (variable, variable)
    chosen = from_environment(**{variable: value}, EVERYWIRE_LISTEN__HOST="::1", EVERYWIRE_DRAIN__TIMEOUT="25s")
    assert (chosen.listen.host, chosen.drain.timeout) == ("::1", 25.0)


def test_elsewhere_and_with_empty_variables_it_is_no_container() -> None:
    empty = {"SAGEMAKER_BIND_TO_PORT": "", "SAGEMAKER_MULTI_MODEL": "", "SAGEMAKER_SAFE_PORT_RANGE": ""}
    others = {"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2/credentials/x", "SAGEMAKER_MODEL_SERVER_WORKERS": "2"}
    assert from_environment(**empty, **others) == Config()


@pytest.mark.parametrize("port", [9000, 9999])
def test_other_ports_may_be_opened_inside_the_safe_range_with_its_ends(port: int) -> None:
    environ = {"SAGEMAKER_SAFE_PORT_RANGE": "9000-9999"}
    for overrides in ({"listen.bidi_port": port}, {"tls.dev": True, "listen.tls_port": port}):
        load(file=None, environ=environ, overrides=overrides)
    assert load(file=None, environ=environ, overrides={"tls.dev": True, "listen.tls_port": -1}).listen.port == 8080


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        ({"listen.bidi_port": 8081}, "listen.bidi_port (--set listen.bidi_port) is 8081"),
        ({"listen.bidi_port": 8999}, "listen.bidi_port (--set listen.bidi_port) is 8999"),
        ({"listen.bidi_port": 10000}, "listen.bidi_port (--set listen.bidi_port) is 10000"),
        ({"listen.bidi_port": 0}, "listen.bidi_port (--set listen.bidi_port) is 0"),
        ({"tls.dev": True}, "listen.tls_port is 8443"),
    ],
)
def test_a_port_outside_the_safe_range_is_refused_before_sagemaker_does(overrides: dict[str, Any], start: str) -> None:
    assert complaint(environ={"SAGEMAKER_SAFE_PORT_RANGE": "9000-9999"}, overrides=overrides) == (
        f"{start}, outside SAGEMAKER_SAFE_PORT_RANGE, which is 9000-9999: SageMaker allows no other port beside "
        "listen.port; -1 opens none"
    )


@pytest.mark.parametrize("text", ["9000", "9999-9000", "0-10", "1-65536", "a-b", "9000-", " ", "9000-9999\n1", "9" * 300])
def test_a_safe_range_that_is_none_names_its_form(text: str) -> None:
    message = complaint(environ={"SAGEMAKER_SAFE_PORT_RANGE": text})
    assert message.startswith("SAGEMAKER_SAFE_PORT_RANGE must be two ports, the lower one first, such as 9000-9999, not '")
    assert len(message) < 250


# ---- the file ----


def test_every_section_of_a_file_reaches_its_place(directory: Path) -> None:
    config = from_file(
        """
        [limits]
        head_timeout = 5
        body = "64 MiB"
        json = 1024
        [log]
        level = "debug"
        format = "text"
        [models.lm]
        factory = "models.library.lm:LanguageModel"
        capacity = 4
        restart = { intensity = 0, period = "1min" }
        [models.lm.options]
        seed = 7
        table = { deep = [1, { x = 2 }] }
        ["models"."llama-3.1"]
        factory = "app:nets.llama"
        """
    )
    assert (config.limits.head_timeout, config.limits.body, config.limits.json) == (5.0, 64 * 2**20, 1024)
    assert isinstance(config.limits.head_timeout, float)
    assert (config.log.level, config.log.format) == ("debug", "text")
    lm = config.models["lm"]
    assert (lm.capacity, lm.queue, lm.restart.intensity, lm.restart.period) == (4, None, 0, 60.0)
    assert lm.options == {"seed": 7, "table": {"deep": [1, {"x": 2}]}}
    assert config.models["llama-3.1"].factory == "app:nets.llama"


def test_empty_sections_change_nothing(directory: Path) -> None:
    assert from_file("[listen]\n[models]\n[limits]\n[sagemaker.sigv4]\n[endpoints]\n") == Config()


def test_endpoints_are_read_with_their_variants_from_a_file_and_the_environment(directory: Path) -> None:
    config = from_file(
        """
        [endpoints.chat.variants.blue]
        model = "llama-3.1"
        weight = 9
        [endpoints.chat.variants]
        green = { model = "lm", weight = 0.5 }
        [endpoints.Many-1]
        models = "/opt/ml/models/many"
        """,
        {"EVERYWIRE_ENDPOINTS__chat__VARIANTS__Red__MODEL": "lm", "EVERYWIRE_ENDPOINTS__chat__VARIANTS__green__WEIGHT": "0"},
    )
    chat = config.endpoints["chat"].variants
    assert {name: (variant.model, variant.weight) for name, variant in chat.items()} == {
        "blue": ("llama-3.1", 9.0),
        "green": ("lm", 0.0),
        "Red": ("lm", 1.0),
    }
    assert isinstance(chat["blue"].weight, float)
    assert config.endpoints["Many-1"].models == "/opt/ml/models/many"


@pytest.mark.parametrize("name", ["a", "9", "A-b", "a--b", "a" * 63, "a" + "-" * 61 + "b"])
def test_what_sagemaker_takes_for_a_name_is_one(name: str) -> None:
    config = from_flags({f"endpoints.{name}.variants.{name}.model": "lm", "sagemaker.variant": name})
    assert list(config.endpoints) == list(config.endpoints[name].variants) == [config.sagemaker.variant]


@pytest.mark.parametrize("name", ["", "-", "a-", "-a", "a_b", "a.b", "é", "a" * 64, "a" + "-" * 62 + "b", "a\n"])
def test_what_sagemaker_takes_for_no_name_is_none(name: str) -> None:
    text = json.dumps(name)
    assert "cannot be the name of an endpoint" in complaint(overrides={f"endpoints.{text}.variants.b.model": "lm"})
    assert "cannot be the name of a variant" in complaint(overrides={f"endpoints.a.variants.{text}.model": "lm"})
    assert "sagemaker.variant must be" in complaint(overrides={"sagemaker.variant": name})


def test_a_list_of_paths_replaces_the_one_before(directory: Path) -> None:
    file = '[repository]\nroots = ["/srv/a", "b c"]'
    assert from_file(file).repository.roots == ("/srv/a", "b c")
    assert from_file(file, {"EVERYWIRE_REPOSITORY__ROOTS": "/x"}).repository.roots == ("/x",)


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("/srv/a:/srv/b", ("/srv/a", "/srv/b")),
        ("/srv/a", ("/srv/a",)),
        ("5", ("5",)),
        ("", ()),
        ("[]", ()),
        (' ["/srv/a:b", "c"]', ("/srv/a:b", "c")),
    ],
)
def test_a_list_of_paths_from_text_is_an_array_or_as_in_path(text: str, paths: tuple[str, ...]) -> None:
    assert from_environment(EVERYWIRE_REPOSITORY__ROOTS=text).repository.roots == paths
    assert from_flags({"repository.roots": text}).repository.roots == paths


@pytest.mark.parametrize("text", [":", "/a:", "/a::/b", "[/a, /b]", '["a"', "[5]", '[""]', "a\0b", '["a\\u0000"]'])
def test_a_list_of_paths_with_none_or_none_that_can_be_is_refused(text: str) -> None:
    assert "repository.roots must be a list of paths" in complaint(overrides={"repository.roots": text})


def test_the_options_of_a_model_join_over_the_sources(directory: Path) -> None:
    config = from_file(
        '[models.lm]\nfactory = "a:b"\noptions = { x = 1, y = 1, z = 1 }',
        {"EVERYWIRE_MODELS__lm__OPTIONS__y": "2", "EVERYWIRE_MODELS__lm__OPTIONS__Name": "two words"},
        **{"models.lm.options": "{ z = 3 }"},
    )
    assert config.models["lm"].options == {"x": 1, "y": 2, "z": 3, "Name": "two words"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[limits]\nhaed_timeout = 5", "limits.haed_timeout is not a setting: did you mean limits.head_timeout?"),
        ("[limit]\nhead = 5", "limit.head is not a setting: did you mean limits.head?"),
        ("[http]\nstreams = 5", "http.streams is not a setting: did you mean http2.streams?"),
        ("[server]\nkeep_alive = 5", "server.keep_alive is not a setting: did you mean limits.keep_alive?"),
        ("port = 5", "port is not a setting: did you mean listen.port?"),
        ("[server]\nfoo = 5", "server.foo is not a setting; `everywire config` prints all there are"),
        ("[server]", "server is not a setting; `everywire config` prints all there are"),
        ("[listen.port]\nx = 1", "listen.port.x is not a setting: did you mean listen.port?"),
        ("[models.lm]\nfactry = 'a:b'", "models.lm.factry is not a setting: did you mean models.lm.factory?"),
        (
            "[models.lm.restart]\ncount = 1",
            "models.lm.restart.count is not a setting; `everywire config` prints all there are",
        ),
        ("[model.lm]\nfactory = 'a:b'", "model.lm.factory is not a setting: did you mean models.NAME.factory?"),
        ("[listen]\noperator_port = 5", "listen.operator_port is not a setting: did you mean operator.port?"),
        ("[bidi]\nvariant = 'blue'", "bidi.variant is not a setting: did you mean sagemaker.variant?"),
        ("[endpoints.chat]\nmodel = 'lm'", "endpoints.chat.model is not a setting: did you mean endpoints.chat.models?"),
        (
            "[endpoints.chat.variants.blue]\nwieght = 1",
            "endpoints.chat.variants.blue.wieght is not a setting: did you mean endpoints.chat.variants.blue.weight?",
        ),
        (
            "[endpoints.chat.variant.blue]\nweight = 1",
            "endpoints.chat.variant.blue.weight is not a setting: did you mean endpoints.chat.variants.VARIANT.weight?",
        ),
        (
            "[endpoint.chat.variants.blue]\nmodel = 'lm'",
            "endpoint.chat.variants.blue.model is not a setting: did you mean endpoints.NAME.variants.VARIANT.model?",
        ),
        ('["\\u0007"]\nx = 1', '"\\u0007".x is not a setting; `everywire config` prints all there are'),
    ],
)
def test_a_key_that_is_no_setting_names_the_file_and_the_nearest_setting(directory: Path, text: str, message: str) -> None:
    assert complaint(file=text) == f"everywire.toml: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[listen]\nport = "9000"', "listen.port must be a whole number from -1 to 65535, not '9000'"),
        (
            "[listen]\nhost = ''",
            'listen.host must be an address or a host name ("0.0.0.0" for every IPv4 address, "::" for IPv6 too), unix:/PATH or '
            "systemd:NAME, or a list of them, not ''",
        ),
        ("[tls]\ndev = 'yes'", "tls.dev must be true or false, not 'yes'"),
        ("[tls]\ncert = 1", "tls.cert must be a string, not 1"),
        (
            "[limits]\nbody = '64 KB/s'",
            'limits.body must be a number of bytes, at least 1, such as 65536, "64 KiB" or "1GiB", not \'64 KB/s\'',
        ),
        (
            "[limits]\nhead_timeout = 0",
            'limits.head_timeout must be a duration above 0, such as 30, "500ms" or "5min", not 0',
        ),
        (
            "[http2]\nframe_size = 16383",
            'http2.frame_size must be a number of bytes from 16384 to 16777215, such as 65536, "64 KiB" or "1GiB", not 16383',
        ),
        ("[websocket]\npath = 'ws'", "websocket.path must be a path that begins with /, without { and }, not 'ws'"),
        (
            "[websocket]\npath = '/{a}/{a}'",
            "websocket.path must be a path that begins with /, without { and }, not '/{a}/{a}'",
        ),
        ("[log]\nlevel = 'verbose'", "log.level must be one of debug, info, warning, error, not 'verbose'"),
        (
            "[lmi]\noutput_formatter = 'xml'",
            "lmi.output_formatter must be one of \"\", json, jsonlines, sse, json_chat, jsonlines_chat, not 'xml'",
        ),
        (
            "[models.lm]\nfactory = 'app.py'",
            "models.lm.factory must be \"module:attribute\", or the name of a library model, not 'app.py'",
        ),
        ("listen = 5", "listen is a section, and cannot be 5: set listen.host and so on"),
        ("[models]\nlm = 'a:b'", "models.lm is a section, and cannot be 'a:b': set models.lm.factory and so on"),
        ("models = 5", "models is a section, and cannot be 5: set models.NAME.factory and so on"),
        ("[models.lm]", 'models.lm has no factory, which must be "module:attribute", or the name of a library model'),
        (
            "[models.'a b']\nfactory = 'a:b'",
            "'a b' cannot be the name of a model: 1 to 128 letters, digits, '.', '_' and '-', beginning with a letter, "
            "a digit or '_'",
        ),
        (
            "[endpoints.chat]\nvariants = 5",
            "endpoints.chat.variants is a section, and cannot be 5: set endpoints.chat.variants.VARIANT.model and so on",
        ),
        (
            "[endpoints.chat.variants.blue]\nweight = 1",
            "endpoints.chat.variants.blue has no model, which must be the name of a model",
        ),
        (
            "[endpoints.'chat_1']\nmodels = '/opt/ml/models'",
            "'chat_1' cannot be the name of an endpoint: 1 to 63 letters, digits and '-', neither beginning nor ending with '-'",
        ),
        (
            "[endpoints.chat.variants.'-blue']\nmodel = 'lm'",
            "'-blue' cannot be the name of a variant: 1 to 63 letters, digits and '-', neither beginning nor ending with '-'",
        ),
        (
            "[endpoints.chat.variants.blue]\nweight = -0.5",
            "endpoints.chat.variants.blue.weight must be a number, at least 0, not -0.5",
        ),
        ('[endpoints.chat]\nmodels = "a\\u0000b"', "endpoints.chat.models must be a path, not 'a\\x00b'"),
        (
            "[repository]\nroots = '/srv:/opt'",
            'repository.roots must be a list of paths, such as ["/srv/models", "more"], not \'/srv:/opt\'',
        ),
        (
            "[sagemaker]\nvariant = 'all_traffic'",
            "sagemaker.variant must be 1 to 63 letters, digits and '-', neither beginning nor ending with '-', "
            "not 'all_traffic'",
        ),
    ],
)
def test_a_wrong_value_names_the_file_the_key_what_was_expected_and_what_came(
    directory: Path, text: str, message: str
) -> None:
    assert complaint(file=text) == f"everywire.toml: {message}"


def test_a_choice_that_is_misspelt_names_the_nearest(directory: Path) -> None:
    (found,) = problems("[log]\nlevel = 'WARN'\n")
    assert found.text == (
        "everywire.toml:2: log.level must be one of debug, info, warning, error, not 'WARN': did you mean warning?"
    )
    assert found.suggestion == "warning"


def test_what_came_is_not_echoed_at_length(directory: Path) -> None:
    message = complaint(file=f"[listen]\nport = '{'x' * 5000}'")
    assert message.endswith("x...")
    assert len(message) < 250
    assert len(complaint(file=f"{'x' * 5000} = 1")) < 250


def test_a_number_beyond_any_machine_is_a_wrong_value(directory: Path) -> None:
    for setting in ("limits.fields", "limits.body", "limits.keep_alive"):
        assert f"everywire.toml: {setting} must be" in complaint(file=f"{setting} = {'9' * 400}")


def test_a_file_that_is_not_toml_says_where(directory: Path) -> None:
    assert complaint(file="[listen]\nport 5").startswith("everywire.toml: is not TOML: ")
    assert "line 2" in complaint(file="[listen]\nport 5")
    assert complaint(file=f"x = {'[' * 5000}").startswith("everywire.toml: is not TOML: ")


def test_a_file_that_cannot_be_read_says_why(directory: Path) -> None:
    (directory / "latin.toml").write_bytes(b"# caf\xe9")
    for name, why in [
        ("missing.toml", "cannot be read: No such file or directory"),
        (".", "cannot be read: Is a directory"),
        ("latin.toml", "is not UTF-8 text (at byte 5)"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load(file=Path(name), environ={}, overrides={})
        assert str(caught.value) == f"{name}: {why}"


# ---- the environment ----


def test_the_environment_sets_any_type_from_text() -> None:
    config = from_environment(
        EVERYWIRE_LISTEN__PORT="9000",
        EVERYWIRE_TLS__DEV="true",
        EVERYWIRE_LIMITS__BODY="64 KiB",
        EVERYWIRE_LIMITS__JSON="100",
        EVERYWIRE_LIMITS__HEAD_TIMEOUT="500ms",
        EVERYWIRE_LOG__LEVEL="warning",
        EVERYWIRE_MODELS__lm__FACTORY="app:lm",
        EVERYWIRE_MODELS__lm__CAPACITY="4",
        EVERYWIRE_MODELS__lm__RESTART__BACKOFF="0",
        EVERYWIRE_MODELS__lm__OPTIONS="{ seed = 3 }",
    )
    assert config.listen.port == 9000
    assert config.tls.dev is True
    assert (config.limits.body, config.limits.json, config.limits.head_timeout) == (65536, 100, 0.5)
    assert config.log.level == "warning"
    lm = config.models["lm"]
    assert (lm.factory, lm.capacity, lm.restart.backoff, lm.options) == ("app:lm", 4, 0.0, {"seed": 3})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ('"3"', "3"),
        ("three", "three"),
        ("a = 1", "a = 1"),
        ("", ""),
        ("1\nb=2", "1\nb=2"),
    ],
)
def test_an_option_from_text_is_toml_where_it_can_be(text: str, value: object) -> None:
    config = from_environment(EVERYWIRE_MODELS__lm__FACTORY="a:b", EVERYWIRE_MODELS__lm__OPTIONS__x=text)
    assert config.models["lm"].options == {"x": value}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "EVERYWIRE_LIMITS__HAED_TIMEOUT",
            "5",
            "EVERYWIRE_LIMITS__HAED_TIMEOUT: limits.haed_timeout is not a setting: did you mean limits.head_timeout?",
        ),
        (
            "EVERYWIRE_LISTEN_PORT",
            "9000",
            "EVERYWIRE_LISTEN_PORT is not a setting: did you mean EVERYWIRE_LISTEN__PORT?",
        ),
        ("EVERYWIRE_DEBUG", "1", "EVERYWIRE_DEBUG is not a setting: settings are named EVERYWIRE_SECTION__KEY"),
        ("EVERYWIRE_LISTEN", "9000", "EVERYWIRE_LISTEN is not a setting: settings are named EVERYWIRE_SECTION__KEY"),
        (
            "EVERYWIRE_LISTEN__PORT",
            "http",
            "EVERYWIRE_LISTEN__PORT: listen.port must be a whole number from -1 to 65535, not 'http'",
        ),
        (
            "EVERYWIRE_LISTEN__PORT",
            "",
            "EVERYWIRE_LISTEN__PORT: listen.port must be a whole number from -1 to 65535, not ''",
        ),
        ("EVERYWIRE_TLS__DEV", "yes", "EVERYWIRE_TLS__DEV: tls.dev must be true or false, not 'yes'"),
        (
            "EVERYWIRE_LISTEN__HOST",
            "caf\udce9",
            "EVERYWIRE_LISTEN__HOST: listen.host must be UTF-8 text, not 'caf\\udce9'",
        ),
        (
            "EVERYWIRE_MODELS__lm",
            "app:lm",
            "EVERYWIRE_MODELS__lm: models.lm is a section, and cannot be 'app:lm': set models.lm.factory and so on",
        ),
        (
            "EVERYWIRE_MODELS__lm__OPTIONS",
            "3",
            "EVERYWIRE_MODELS__lm__OPTIONS: models.lm.options must be a table, not '3'",
        ),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str, message: str) -> None:
    assert complaint(environ={name: value}) == message


def test_a_variant_in_capitals_that_is_not_configured_points_to_the_one_that_is(directory: Path) -> None:
    message = complaint(
        file='[endpoints.chat.variants]\nblue.model = "lm"\ngreen.model = "lm"',
        environ={"EVERYWIRE_ENDPOINTS__CHAT__VARIANTS__BLUE__WEIGHT": "2"},
    )
    assert message == (
        "EVERYWIRE_ENDPOINTS__CHAT__VARIANTS__BLUE__WEIGHT: endpoints.CHAT.variants.BLUE has no model, which must be the "
        "name of a model: did you mean endpoints.chat.variants.blue?"
    )


def test_a_model_in_capitals_that_is_not_configured_points_to_the_one_that_is(directory: Path) -> None:
    message = complaint(file='[models.lm]\nfactory = "a:b"', environ={"EVERYWIRE_MODELS__LM__CAPACITY": "4"})
    assert message == (
        'EVERYWIRE_MODELS__LM__CAPACITY: models.LM has no factory, which must be "module:attribute", or the name of a library model: did you mean models.lm?'
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EVERYWIRE_PORT", "tcp://10.0.0.1:8080"),
        ("EVERYWIRE_PORT_8080_TCP", "tcp://10.0.0.1:8080"),
        ("EVERYWIRE_PORT_8080_TCP_ADDR", "10.0.0.1"),
        ("EVERYWIRE_SERVICE_HOST", "10.0.0.1"),
        ("EVERYWIRE_SERVICE_PORT", "8080"),
        ("EVERYWIRE_SERVICE_PORT_HTTP", "8080"),
        ("EVERYWIRE_LISTEN_PORT", "tcp://10.0.0.1:8080"),
    ],
)
def test_what_kubernetes_sets_for_a_service_named_everywire_is_left_alone(name: str, value: str) -> None:
    assert from_environment(**{name: value}) == Config()


# ---- overrides ----


def test_overrides_take_values_or_text_under_quoted_keys() -> None:
    config = from_flags({"listen.port": 1, "limits.head": "1 KiB", 'models."llama-3.1".factory': "a:b"})
    assert (config.listen.port, config.limits.head, config.models["llama-3.1"].factory) == (1, 1024, "a:b")


@pytest.mark.parametrize("key", ["", "limits head", "limits.", "a = 1\nb", "x = {}\n[y]\nz", f"x = {'[' * 9000}"])
def test_an_override_needs_a_key(key: str) -> None:
    assert complaint(overrides={key: "1"}).endswith("is not a key such as limits.head")


def test_an_unknown_override_names_the_flag_and_the_nearest_setting() -> None:
    assert complaint(overrides={"limits.haed": "1"}) == (
        "--set limits.haed: limits.haed is not a setting: did you mean limits.head?"
    )


def test_an_option_inside_an_option_is_set_with_the_whole_option() -> None:
    assert "models.lm.options.a.b is not a setting" in complaint(overrides={"models.lm.options.a.b": "1"})


# ---- quantities ----


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("65536", 65536), ("64 KiB", 65536), ("64KiB", 65536), ("1GiB", 2**30), ("1.5 MiB", 3 * 2**19), ("1tib", 2**40),
     ("2 kB", 2000), ("2KB", 2000), ("7 B", 7), (" 7 ", 7), ("1MB", 10**6), ("1GB", 10**9), ("1TB", 10**12)],
)  # fmt: skip
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "KiB", "-1", "1.5", "0.3 KiB", "1 K", "1  KiB", "64 KiB/s", "0x10", "1_000", "１", "9" * 16]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30.0),
        ("0.1", 0.1),
        ("30s", 30.0),
        ("500ms", 0.5),
        ("5min", 300.0),
        ("1 h", 3600.0),
        ("1.5 S", 1.5),
        ("0", 0.0),
    ],
)
def test_durations_are_read_with_their_units(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "5m", "1e3", "inf", "nan", "1:30", "5 minutes"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_duration(text)


@given(st.text(max_size=20))
def test_no_text_breaks_the_quantities(text: str) -> None:
    for parse in (parse_size, parse_duration):
        with contextlib.suppress(ValueError):
            assert parse(text) >= 0


@given(st.text(max_size=30), st.text(max_size=30))
def test_no_override_ends_in_anything_but_a_configuration_or_its_error(key: str, value: str) -> None:
    for overrides in ({key: value}, {f"models.lm.options.{key}": value, "models.lm.factory": "a:b"}):
        message = ""
        try:
            from_flags(overrides)
        except ConfigError as error:
            message = str(error)
        assert "\n" not in message
        assert len(message) < 500


# ---- agreement ----


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"tls.cert": "a.pem"}, "tls.cert (--set tls.cert) is set and tls.key is not: a certificate needs its key"),
        (
            {"tls.client_ca": "ca.pem"},
            "tls.client_ca (--set tls.client_ca) is set and TLS is off: no client would be asked for a certificate",
        ),
        ({"tls.key": "a.pem"}, "tls.key (--set tls.key) is set and tls.cert is not: a certificate needs its key"),
        (
            {"tls.dev": True, "tls.cert": "a", "tls.key": "b"},
            "tls.dev (--set tls.dev) and tls.cert (--set tls.cert) are both set: choose one certificate",
        ),
        (
            {"tls.dev": True, "listen.port": 8443},
            "listen.port (--set listen.port) and listen.tls_port are both 8443: each needs a port of its own",
        ),
        (
            {"listen.port": -1},
            "listen.port (--set listen.port) is -1 and no other port is opened either: nothing would be served",
        ),
        (
            {"listen.port": -1, "tls.dev": True, "listen.tls_port": -1},
            "listen.port (--set listen.port) is -1 and no other port is opened either: nothing would be served",
        ),
        (
            {"http2.initial_window": "1 MiB"},
            "http2.initial_window (--set http2.initial_window) is 1048576, more than http2.max_window, which is 262144",
        ),
        (
            {"limits.connection_send_buffer": 1024},
            "limits.send_buffer is 65536, more than limits.connection_send_buffer (--set limits.connection_send_buffer), "
            "which is 1024",
        ),
        (
            {"models.lm.factory": "a:b", "models.lm.restart.backoff": "6s", "models.lm.restart.backoff_max": "5s"},
            "models.lm.restart.backoff (--set models.lm.restart.backoff) is 6.0, more than models.lm.restart.backoff_max "
            "(--set models.lm.restart.backoff_max), which is 5.0",
        ),
        (
            {"listen.bidi_port": 8080},
            "listen.port and listen.bidi_port (--set listen.bidi_port) are both 8080: each needs a port of its own",
        ),
        (
            {"listen.host": ["systemd"], "operator.host": ["systemd:plane"], "operator.open": True},
            "listen.host (--set listen.host) has 'systemd' and operator.host (--set operator.host) has 'systemd:plane', "
            "the same socket: each needs its own",
        ),
        (
            {"listen.bidi_port": 8443, "tls.dev": True},
            "listen.bidi_port (--set listen.bidi_port) and listen.tls_port are both 8443: each needs a port of its own",
        ),
        (
            {"endpoints.chat.variants.blue.model": "lm", "endpoints.chat.models": "/opt/ml/models"},
            "endpoints.chat.models (--set endpoints.chat.models) and endpoints.chat.variants.blue.model (--set "
            "endpoints.chat.variants.blue.model) are both set: choose a folder or variants",
        ),
        (
            {"endpoints.chat.models": ""},
            "endpoints.chat (--set endpoints.chat.models) has neither variants nor models: no call of it would reach a model",
        ),
        (
            {"endpoints.chat": {}},
            "endpoints.chat (--set endpoints.chat) has neither variants nor models: no call of it would reach a model",
        ),
        (
            {
                f"endpoints.chat.variants.{name}.{key}": value
                for name in "ab"
                for key, value in (("model", "lm"), ("weight", 0))
            },
            "endpoints.chat (--set endpoints.chat.variants.a.model): the weight of each variant is 0: a call that names none "
            "would reach no model",
        ),
        (
            {"repository.code": "/opt/ml/models/mine:/opt/ml/modelsb"},
            "repository.code (--set repository.code): '/opt/ml/modelsb' is neither one of repository.roots nor under one",
        ),
        (
            {"repository.code": "/", "repository.roots": "/srv"},
            "repository.code (--set repository.code): '/' is neither one of repository.roots (--set repository.roots) nor "
            "under one",
        ),
        (
            {"endpoints.chat.models": "/opt/ml/models/../mine"},
            "endpoints.chat.models (--set endpoints.chat.models): '/opt/ml/models/../mine' is neither one of "
            "repository.roots nor under one",
        ),
    ],
)
def test_values_that_contradict_one_another_are_named_with_their_sources(overrides: dict[str, Any], message: str) -> None:
    assert complaint(overrides=overrides) == message


@pytest.mark.parametrize(
    ("said", "hosts"),
    [
        ("::1", "::1"),
        ("1.5", "1.5"),
        ('["127.0.0.1", "::1"]', ("127.0.0.1", "::1")),
        ("unix:/run/x", "unix:/run/x"),
        ("systemd+tls:https", "systemd+tls:https"),
        ("unix.example.com", "unix.example.com"),
    ],
)
def test_where_to_listen_is_an_address_or_a_list_of_them_in_every_source(directory: Path, said: str, hosts: Any) -> None:
    tls = {"tls.dev": True}
    assert from_flags({"listen.host": said, **tls}).listen.host == hosts
    assert load(file=None, environ={"EVERYWIRE_LISTEN__HOST": said}, overrides=tls).listen.host == hosts
    if not isinstance(hosts, str):
        assert from_file(f"[listen]\nhost = {said}").listen.host == hosts


@pytest.mark.parametrize(
    "host",
    [
        "unix",
        "unix:",
        "unix:relative",
        "unix+ssl:/x",
        "systemd:",
        "systemd:a:b",
        "[::1]",
        "[]",
        '["::1", "::1"]',
        "http://x",
    ],
)
def test_where_nothing_can_listen_is_refused(host: str) -> None:
    assert "listen.host must be an address or a host name" in complaint(overrides={"listen.host": host})


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        # the words of a setting of another section
        ("tls.port", "listen.tls_port"),
        ("bidi.port", "listen.bidi_port"),
        ("operator.tls_port", "operator.port"),
        ("http2.max_streams", "http2.streams"),
        ("proxies.trusted", "listen.trusted_proxies"),
        # joined in another way
        ("tls_cert", "tls.cert"),
        ("log_level", "log.level"),
        ("listen.tls.port", "listen.tls_port"),
        ("sagemaker.sigv4_region", "sagemaker.sigv4.region"),
        # with one too many
        ("server.tls_cert", "tls.cert"),
        ("port", "listen.port"),
    ],
)
def test_a_setting_that_is_elsewhere_is_named(said: str, meant: str) -> None:
    assert complaint(overrides={said: 1}).endswith(f"{said} is not a setting: did you mean {meant}?")
    variable = "EVERYWIRE_" + said.replace(".", "__").upper()
    hint = f"did you mean {meant if '.' in said else 'EVERYWIRE_' + meant.replace('.', '__').upper()}?"
    assert complaint(environ={variable: "1"}).endswith(hint)
    single = "EVERYWIRE_" + said.replace(".", "_").upper()
    assert complaint(environ={single: "1"}).endswith(f"did you mean EVERYWIRE_{meant.replace('.', '__').upper()}?")


def test_proxies_are_addresses_networks_and_a_word() -> None:
    listed = '["10.0.0.0/8", "::1", "fd00::/8", "unix"]'
    assert from_flags({"listen.trusted_proxies": listed}).listen.trusted_proxies == tuple(json.loads(listed))
    for wrong in ('["10.0.0.1/8"]', '["proxy.example.com"]', '["unix:/run/s"]', '["10.0.0.0/33"]', "10.0.0.0/8", '[""]'):
        message = complaint(overrides={"listen.trusted_proxies": wrong})
        assert 'listen.trusted_proxies must be a list of addresses, networks and "unix", such as ' in message


@pytest.mark.parametrize("mode", ["rw", "66", "0o660", "888", "06660"])
def test_a_mode_is_three_octal_digits(mode: str) -> None:
    for section in ("listen", "operator"):
        message = f'{section}.unix_mode must be three octal digits, such as "660", not {mode!r}'
        assert complaint(overrides={f"{section}.unix_mode": mode}).endswith(message)
    assert from_flags({"listen.unix_mode": "0600"}).listen.unix_mode == "0600"


def test_sockets_without_a_port_are_served_though_no_port_is() -> None:
    for host in ("unix:/run/x", "systemd", "systemd:http"):
        assert from_flags({"listen.host": host, "listen.port": -1}).listen.host == host
        # nor are their ports in the way of one another, or of SageMaker's range
        same = {"listen.host": host, "listen.bidi_port": 8080, "operator.port": 8080}
        assert load(file=None, environ={"SAGEMAKER_SAFE_PORT_RANGE": "1-2"}, overrides=same).listen.host == host
    message = complaint(overrides={"listen.host": ("unix:/a", "unix+tls:/b")})
    assert (
        message == "listen.host (--set listen.host) has a socket with TLS, and TLS is off: set tls.cert, or leave +tls out"
    )


def test_two_free_ports_or_tls_alone_are_no_contradiction() -> None:
    assert from_flags({"tls.dev": True, "listen.port": 0, "listen.tls_port": 0}).tls.dev
    assert from_flags({"tls.dev": True, "listen.port": -1}).listen.port == -1
    assert from_flags({"listen.port": 8443}).listen.port == 8443
    assert from_flags({"listen.port": -1, "listen.bidi_port": 8081}).listen.bidi_port == 8081
    assert from_flags({"listen.bidi_port": 8443}).listen.bidi_port == 8443


def test_code_may_run_from_a_root_and_from_under_one_after_following_links(directory: Path) -> None:
    (directory / "real" / "mine").mkdir(parents=True)
    (directory / "link").symlink_to("real")
    (directory / "real" / "out").symlink_to("/")
    for roots, code in [
        ("real", "real"),
        ("real", "real/mine/deep"),
        ("link", "real/mine"),
        ("real", "link"),
        ("/", "real"),
    ]:
        config = from_flags({"repository.roots": roots, "repository.code": code})
        assert config.repository.code == (code,)
    for code in ("real/out", "real/..", "rea"):
        assert "repository.code" in complaint(overrides={"repository.roots": "real", "repository.code": code})


def test_a_variant_may_name_a_model_that_is_not_configured_and_one_weight_may_be_zero() -> None:
    overrides = {
        "endpoints.a.variants.b.model": "echo",
        "endpoints.a.variants.c.model": "x",
        "endpoints.a.variants.c.weight": 0,
    }
    assert from_flags(overrides).endpoints["a"].variants["c"].weight == 0
    assert from_flags({"sagemaker.sigv4.region": "eu-west-1"}).sagemaker.sigv4.credentials == ""


# ---- the schema ----


def test_every_default_is_a_value_that_its_setting_allows() -> None:
    for setting in SETTINGS.values():
        if not setting.required and "*" not in setting.path and setting.default is not None:
            default = list(setting.default) if setting.unit is Unit.PATHS else setting.default
            assert from_flags({setting.key: default}) == Config(), setting.key


def test_every_table_of_named_sections_says_what_its_names_are() -> None:
    tables = {setting.path[:n] for setting in SETTINGS.values() for n, part in enumerate(setting.path) if part == "*"}
    assert set(NAMES) == tables


def test_what_has_no_default_is_required() -> None:
    required = [setting.key for setting in SETTINGS.values() if setting.required]
    assert required == ["models.*.factory", "endpoints.*.variants.*.model"]


def test_every_number_has_a_unit() -> None:
    for setting in SETTINGS.values():
        if setting.default is None and not setting.required:
            continue
        assert (setting.unit in (Unit.SECONDS, Unit.NUMBER)) == isinstance(setting.default, float), setting.key
        assert (setting.unit in (Unit.COUNT, Unit.BYTES)) == (type(setting.default) is int), setting.key


def test_what_a_model_may_say_itself_has_the_unit_of_any_such_number_and_no_default() -> None:
    own = {
        dotted(setting.path[2:]): setting.unit
        for setting in SETTINGS.values()
        if setting.path[0] == "models" and setting.default is None and not setting.required
    }
    batching = {
        "enabled": Unit.FLAG, "max_delay": Unit.SECONDS, "preferred": Unit.COUNTS, "pad_rows": Unit.FLAG,
        "instances": Unit.COUNT, "retry": Unit.FLAG, "priority_levels": Unit.COUNT, "default_priority": Unit.COUNT,
    }  # fmt: skip
    counts, seconds, tensors = (
        dict.fromkeys(
            ("capacity", "queue", "max_batch_size", "threads", "stuck_limit", "party_share", "context"), Unit.COUNT
        ),
        dict.fromkeys(
            ("timeout", "load_timeout", "queue_timeout", "step_timeout", "stall_timeout", "stop_within", "idle_when_wanted"),
            Unit.SECONDS,
        ),
        dict.fromkeys(("inputs", "outputs"), Unit.TENSORS),
    )
    others = {
        "restart.period": Unit.SECONDS, "restart.backoff": Unit.SECONDS, "restart.backoff_max": Unit.SECONDS,
        "version": Unit.TEXT, "served_names": Unit.TEXTS, "warmup": Unit.TEXTS, "queue_bytes": Unit.BYTES, "body_bytes": Unit.BYTES, "memory": Unit.BYTES,
        "subprotocols": Unit.TEXTS, "features": Unit.TEXTS, "restart.kind": Unit.CHOICE, "restart.intensity": Unit.COUNT, "restart.jitter": Unit.NUMBER,
        "restart.escalate": Unit.FLAG, "required": Unit.FLAG, **{f"batching.{name}": unit for name, unit in batching.items()},
    }  # fmt: skip
    process = {"process.enabled": Unit.FLAG, "process.instances": Unit.COUNT, "process.cpu_threads": Unit.COUNT}
    assert own == counts | seconds | tensors | others | process


def with_names(setting: Setting) -> tuple[str, dict[str, Any]]:
    """A key of a configuration that is complete without it, and that configuration."""
    complete = {"models.lm.factory": "a:b", "endpoints.lm.variants.lm.model": "lm"}
    return setting.key.replace("*", "lm"), complete


def test_the_bounds_of_a_setting_are_allowed_and_what_is_beyond_is_not() -> None:
    for setting in SETTINGS.values():
        if setting.unit in (Unit.COUNT, Unit.BYTES, Unit.SECONDS, Unit.NUMBER):
            key, complete = with_names(setting)
            for outside in (setting.low - (not setting.above), setting.high + 1):
                assert f"{key} must be" in complaint(overrides={**complete, key: int(outside)})


def test_each_number_that_the_meaning_of_a_setting_explains_may_be_set() -> None:
    """Such as "0: never"."""
    assert from_flags({"listen.tcp_keepalive": 0}).listen.tcp_keepalive == 0
    explained = []
    for path, setting in SETTINGS.items():
        for number in re.findall(r"[.;] (-?[0-9]+)(?:: | opens | asks )", f". {setting_help(path)}"):
            at_least = setting.low < int(number) if setting.above else setting.low <= int(number)
            assert at_least, f"{setting.key} = {number}"
            assert int(number) <= setting.high, f"{setting.key} = {number}"
            explained.append(f"{setting.key} = {number}")
    assert {"listen.port = -1", "listen.port = 0", "listen.tcp_keepalive = 0", "websocket.ping_interval = 0"} <= set(
        explained
    )
    assert len(explained) > 15


# As the environment or a flag has them, and a file where they are TOML.
_WRONG = {
    Unit.FLAG: ("maybe", "2", "[true]", '"true"'),
    Unit.CHOICE: ("of another kind", "5", '"of another kind"'),
    Unit.COUNT: ("-2", "1.5", "1 KiB", "true", "9223372036854775808", '"1"'),
    Unit.NUMBER: ("-2", "many", "1s", "true", "", "inf", "nan", '"1"'),
    Unit.BYTES: ("-2", "1 XB", "0.3 KiB", "true", "9223372036854775808", '"1 XB"'),
    Unit.SECONDS: ("-2", "5 minutes", "true", "inf", "nan", '"5 minutes"'),
    Unit.PATHS: ("[5]", '[""]', ":"),
    Unit.TEXTS: ("[5]", "x", "5"),
    Unit.ADDRESSES: ("[]", '["a", "a"]', "a b", "unix:"),
    Unit.NETWORKS: ("[5]", '["10.0.0.1/8"]', "x"),
    Unit.COUNTS: ("[0]", "[9223372036854775808]", '["4"]', "[1.5]", "x"),
    Unit.TENSORS: ("5", "[{}]", '[{name = "x", dims = 1}]'),
    Unit.VARIABLES: ("5", "[]", "A=1"),
    Unit.TABLE: ("5", "[]"),
}
_WRONG_IN_A_FILE = {
    Unit.FLAG: ("1",), Unit.TEXT: ("1",), Unit.PATHS: ('"/srv:/opt"',),
    **dict.fromkeys((Unit.TEXTS, Unit.COUNTS, Unit.NETWORKS, Unit.TENSORS), ('"[]"',)),
    **dict.fromkeys((Unit.VARIABLES, Unit.TABLE), ('"{}"',)),
}  # fmt: skip
"""TOML values of the wrong type; their text would be valid in the environment or a flag."""
_NO_SETTING = ("1979-05-27", "[[5]]")
"""A date, and a list of lists."""


def _wrong_text(setting: Setting) -> tuple[str, ...]:
    """A line that ends, where a pattern says what a text may be."""
    return ("text\n",) if setting.pattern and not re.fullmatch(setting.pattern, "text\n") else ()


def test_every_setting_says_in_every_source_what_it_must_be_and_what_came(directory: Path) -> None:
    for setting in SETTINGS.values():
        key, complete = with_names(setting)
        path = tuple(key.split("."))
        variable = "EVERYWIRE_" + "__".join(part if part == "lm" else part.upper() for part in path)
        texts = _WRONG[setting.unit] if setting.unit in _WRONG else _wrong_text(setting)
        others = {name: value for name, value in complete.items() if name != key}
        for text in texts:
            end = f": {key} must be {setting.expected}, not {show(without_secrets(path, text))}"
            assert complaint(environ={variable: text}, overrides=others).startswith(f"{variable}{end}")
            assert complaint(overrides={**others, key: text}).startswith(f"--set {key}{end}")
        for toml in (*texts, *_WRONG_IN_A_FILE.get(setting.unit, ()), *_NO_SETTING):
            with contextlib.suppress(tomllib.TOMLDecodeError):  # a word without quotes
                value = tomllib.loads(f"value = {toml}")["value"]
                said = complaint(file=f"{key} = {toml}", overrides=others)
                end = f": {key} must be {setting.expected}, not {show(without_secrets(path, value))}"
                assert said.startswith(f"everywire.toml{end}")


def test_what_others_have_by_the_names_of_settings_has_the_same_names() -> None:
    """A setting renamed on one side alone would be ignored: its target would keep the default."""

    def names(kind: Any) -> set[str]:
        return {field.name for field in dataclasses.fields(kind)}

    assert names(HTTP1Limits) <= names(LimitsConfig)
    assert names(HTTP2Config) - {"ping_life", "floods"} <= names(HTTP2Limits)
    assert names(HTTP2Limits) - names(HTTP2Config) - {"output", "linger"} <= names(LimitsConfig)
    assert names(ModelConfig) - {"factory", "process"} <= names(ModelSpec)
    assert names(RestartConfig) == names(RestartPolicy)
    assert names(BatchingConfig) - {"enabled"} == names(Batching)
    assert names(TensorConfig) == names(TensorSpec)


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ("5", "must be a list of tensors"),
        ('[{datatype = "FP32"}]', "missing required field `name`"),
        ('[{name = "x", shape = ["a"]}]', "Expected `int`, got `str`"),
        ('[{name = "x", dims = [1]}]', "a tensor has name, datatype, shape, optional, labels, pad, like; not 'dims'"),
    ],
)
def test_a_tensor_that_is_none_is_refused_with_what_is_wrong(directory: Path, tensors: str, why: str) -> None:
    text = f'[models.m]\nfactory = "a:b"\ninputs = {tensors}\n'
    said = complaint(file=text)
    assert "models.m.inputs must be a list of tensors, such as " in said
    assert why in said


def test_the_tensors_of_a_model_are_declared_in_either_form_of_toml_and_as_text(directory: Path) -> None:
    wanted = (TensorConfig(name="x", datatype="FP32", shape=(-1, 4)), TensorConfig(name="m", shape=(), optional=True))
    inline = '[{name = "x", datatype = "FP32", shape = [-1, 4]}, {name = "m", shape = [], optional = true}]'
    tables = """
        [[models.m.inputs]]
        name = "x"
        datatype = "FP32"
        shape = [-1, 4]
        [[models.m.inputs]]
        name = "m"
        shape = []
        optional = true
    """
    for config in (
        from_file(f'[models.m]\nfactory = "a:b"\ninputs = {inline}'),
        from_file('[models.m]\nfactory = "a:b"\n' + tables),
        from_environment(EVERYWIRE_MODELS__m__FACTORY="a:b", EVERYWIRE_MODELS__m__INPUTS=inline),
    ):
        assert config.models["m"].inputs == wanted
        assert (config.models["m"].outputs, config.models["m"].max_batch_size) == (None, None)


def test_zero_means_something_where_the_reference_says_so() -> None:
    zeros = {
        "bidi.idle_timeout": 0, "bidi.padding": 0, "repository.unload_timeout": 0, "endpoints.lm.variants.b.weight": 0,
        "endpoints.lm.variants.b.model": "lm", "endpoints.lm.variants.lm.model": "lm",
    }  # fmt: skip
    config = from_flags(zeros)
    assert (config.bidi.idle_timeout, config.bidi.padding, config.repository.unload_timeout) == (0.0, 0, 0.0)
    for key in ("sagemaker.body", "repository.memory", "repository.models", "sagemaker.sigv4.skew"):
        assert f"{key} must be" in complaint(overrides={key: 0})


# ---- printing ----


def test_the_printed_configuration_reads_back_as_the_same(directory: Path) -> None:
    options = "{ a = 1, b = 'quo\"te', c = [true, 1.5, {x = 2024-01-01T00:00:00Z}], 'd e' = '', e = inf, f = 07:30:00 }"
    overrides = {
        "listen.host": "::1",
        "limits.body": 1000,
        "limits.write_stall": 0,
        'models."llama-3.1".factory': "a:b",
        'models."llama-3.1".options': options,
        "models.lm.factory": "c:d",
        "models.lm.options.control": "\x00\x07\n\x7f\u2028é",
        "repository.roots": ["/opt", '/srv/quo"te, and: colon'],
        "repository.code": ["/opt/mine"],
        "bidi.padding": 64,
        "sagemaker.multi_model": True,
        "sagemaker.sigv4.region": "eu-west-1",
        "endpoints.chat.variants.blue.model": "lm",
        "endpoints.chat.variants.blue.weight": 0.1,
        "endpoints.chat.variants.green.model": "llama-3.1",
        "endpoints.many.models": "/opt/many",
    }
    resolved = resolve(file=None, environ={}, overrides=overrides)
    assert resolved.config.models["lm"].options == {"control": "\x00\x07\n\x7f\u2028é"}
    file = directory / "printed.toml"
    file.write_text(to_toml(resolved), encoding="utf-8")
    assert load(file=file, environ={}, overrides={}) == resolved.config
    assert "\n# capacity: the model's own\n" in to_toml(resolved)


_TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8)


@st.composite
def values(draw: st.DrawFn, setting: Setting) -> Any:
    match setting.unit:
        case Unit.FLAG:
            return draw(st.booleans())
        case Unit.CHOICE:
            return draw(st.sampled_from(setting.choices))
        case Unit.COUNT | Unit.BYTES:
            return draw(st.integers(int(setting.low), int(setting.high)))
        case Unit.SECONDS | Unit.NUMBER:
            return draw(st.floats(setting.low, min(setting.high, 1e9), exclude_min=setting.above))
        case Unit.COUNTS:
            return draw(st.lists(st.integers(int(setting.low), int(setting.high)), max_size=3))
        case Unit.PATHS | Unit.TEXTS:
            items = st.from_regex(re.compile(setting.pattern, re.ASCII), fullmatch=True) if setting.pattern else _TEXTS
            return draw(st.lists(items, max_size=3))
        case Unit.ADDRESSES:
            place = st.from_regex(setting.pattern, fullmatch=True)
            return draw(place | st.lists(place, min_size=1, max_size=3, unique=True))
        case Unit.NETWORKS:
            return draw(
                st.lists(st.ip_addresses().map(str) | st.sampled_from(["unix", "10.0.0.0/8", "fd00::/8"]), max_size=3)
            )
        case Unit.TENSORS:
            shapes = st.none() | st.lists(st.integers(-1, 5), max_size=3)
            return [
                {"name": name, "datatype": draw(st.sampled_from(["", "FP32", "BYTES"])), "optional": draw(st.booleans())}
                | ({} if (shape := draw(shapes)) is None else {"shape": shape})
                for name in draw(st.lists(_TEXTS, max_size=3, unique=True))
            ]
        case Unit.VARIABLES:
            return draw(st.dictionaries(st.from_regex(setting.pattern, fullmatch=True), _TEXTS, max_size=3))
        case Unit.TABLE:
            return draw(st.dictionaries(_TEXTS, _TEXTS | st.integers() | st.booleans(), max_size=3))
        case Unit.TEXT:
            return draw(st.from_regex(setting.pattern, fullmatch=True) if setting.pattern else _TEXTS)


@given(st.data())
@settings(max_examples=150)
def test_whatever_may_be_set_is_printed_so_that_it_reads_back_as_the_same(data: st.DataObject) -> None:
    overrides: dict[str, Any] = {}
    for path in data.draw(st.lists(st.sampled_from(list(SETTINGS)), max_size=6, unique=True)):
        key, complete = with_names(SETTINGS[path])
        overrides |= {**complete, key: data.draw(values(SETTINGS[path]))}
    resolved, contradiction = Resolved(config=Config(), sources={}), ""
    try:
        resolved = resolve(file=None, environ={}, overrides=overrides)
    except ConfigError as error:
        contradiction = str(error)
    assert "must be" not in contradiction
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(to_toml(resolved))
        file.flush()
        assert load(file=Path(file.name), environ={}, overrides={}) == resolved.config


SECRET = "correct-horse-battery"


def test_the_operators_token_is_masked() -> None:
    resolved = resolve(file=None, environ={"EVERYWIRE_OPERATOR__TOKEN": SECRET}, overrides={})
    assert resolved.config.operator.token == SECRET
    printed = to_toml(resolved, masked=True)
    assert 'token = "********"  # EVERYWIRE_OPERATOR__TOKEN, masked' in printed
    assert SECRET not in printed + repr(resolved)


@pytest.mark.parametrize("secret", ["too short", f"{SECRET} {SECRET}", f"{SECRET}\u00e9"])
def test_a_secret_that_cannot_be_one_is_not_shown_either(secret: str) -> None:
    message = complaint(environ={"EVERYWIRE_OPERATOR__TOKEN": secret})
    assert "operator.token must be 16 or more visible ASCII characters, or empty" in message
    assert secret not in message


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "models.internal"])
def test_a_plane_that_others_can_reach_demands_a_token_or_somebody_who_says_that_it_need_not(host: str) -> None:
    reachable = {"operator.host": host, "operator.port": 9000}
    message = complaint(overrides=reachable)
    assert f"operator.host (--set operator.host) is {host!r}, which others can reach" in message
    assert "set operator.token or operator.token_file, or operator.open = true" in message
    for said in ({"operator.token": SECRET}, {"operator.token_file": "tokens"}, {"operator.open": True}):
        assert from_flags({**reachable, **said}).operator.host == host
    assert from_flags({"operator.host": host}).operator.port == -1


def test_a_plane_at_a_socket_needs_no_port_and_a_token_where_nobody_knows_who_reaches_it() -> None:
    assert from_flags({"operator.host": "unix:/run/x"}).operator.port == -1
    for host in ("systemd", "systemd:plane"):
        message = complaint(overrides={"operator.host": host})
        assert f"operator.host (--set operator.host) is {host!r}, which others can reach" in message
        assert from_flags({"operator.host": host, "operator.token": SECRET}).operator.host == host
    listed = {"operator.host": '["127.0.0.1", "10.1.2.3"]', "operator.port": 9000}
    assert "which others can reach" in complaint(overrides=listed)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_a_plane_on_loopback_needs_no_token(host: str) -> None:
    assert from_flags({"operator.host": host, "operator.port": 9000}).operator.token == ""


def test_the_plane_has_a_port_of_its_own_and_is_not_what_is_served() -> None:
    assert "both 8080" in complaint(overrides={"operator.port": 8080})
    assert "nothing would be served" in complaint(overrides={"listen.port": -1, "operator.port": 9000})


def test_what_was_set_is_printed_with_its_source_and_defaults_without_one() -> None:
    environ = {"EVERYWIRE_LISTEN__PORT": "9000", "EVERYWIRE_MODELS__lm__OPTIONS__x": "1"}
    overrides = {"limits.head": "1 KiB", "models.lm.factory": "a:b"}
    lines = to_toml(resolve(file=None, environ=environ, overrides=overrides)).splitlines()
    assert "port = 9000  # EVERYWIRE_LISTEN__PORT" in lines
    assert "tls_port = 8443" in lines
    assert 'head = "1 KiB"  # --set limits.head' in lines
    assert lines[lines.index("[models.lm.options]") + 1] == "x = 1  # EVERYWIRE_MODELS__lm__OPTIONS__x"


SECRETS = """
[models.chat]
factory = "app:Chat"

[models.chat.options]
api_key = "sk-1"
headers = { Authorization = "Bearer 1", accept = "text/plain" }
tokens = ["a", "b"]
hub = "https://me:word@hub.example/x"
eos_token = "</s>"
max_tokens = 5
secret = ""
since = 2024-01-01
most = inf
"""


def test_secrets_are_masked_where_that_is_asked_for(directory: Path) -> None:
    (directory / "everywire.toml").write_text(SECRETS)
    resolved = resolve(file=Path("everywire.toml"), environ={}, overrides={})
    shown = tomllib.loads(to_toml(resolved, masked=True))["models"]["chat"]["options"]
    as_they_are = tomllib.loads(SECRETS)["models"]["chat"]["options"]
    hidden = {
        "api_key": MASK, "headers": {"Authorization": MASK, "accept": "text/plain"}, "tokens": [MASK, MASK],
        "hub": f"https://{MASK}@hub.example/x",
    }  # fmt: skip
    assert shown == {**as_they_are, **hidden}
    assert f'api_key = "{MASK}"  # everywire.toml:6, masked: --show-secrets shows it' in to_toml(resolved, masked=True)
    assert to_json(resolved, masked=True)["models.chat.options.tokens"] == {
        "value": [MASK] * 2,
        "source": "everywire.toml:8",
    }
    assert tomllib.loads(to_toml(resolved))["models"]["chat"]["options"] == as_they_are


def test_a_secret_is_not_told_by_an_error_either() -> None:
    message = complaint(overrides={"models.api_key": "sk-1"})
    assert message == (
        "--set models.api_key: models.api_key is a section, and cannot be '********': set models.api_key.factory and so on"
    )


def test_what_was_changed_is_printed_alone(directory: Path) -> None:
    resolved = resolve(file=None, environ={"EVERYWIRE_LIMITS__HEAD": "1 KiB"}, overrides={"models.lm.factory": "a:b"})
    assert to_toml(resolved, changed=True) == (
        '[limits]\nhead = "1 KiB"  # EVERYWIRE_LIMITS__HEAD\n\n'
        '[models.lm]\nfactory = "a:b"  # --set models.lm.factory\n'
    )  # fmt: skip
    assert to_json(resolved, changed=True) == {
        "limits.head": {"value": 1024, "source": "EVERYWIRE_LIMITS__HEAD"},
        "models.lm.factory": {"value": "a:b", "source": "--set models.lm.factory"},
    }


def test_a_program_is_told_every_value_as_json_has_it(directory: Path) -> None:
    text = SECRETS + "[[models.chat.inputs]]\nname = 'x'\nshape = [-1, 2]\n"
    (directory / "everywire.toml").write_text(text)
    told = to_json(resolve(file=Path("everywire.toml"), environ={}, overrides={}))
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["listen.port"] == {"value": 8080, "source": "default"}
    assert told["limits.head"]["value"] == 32768
    assert told["models.chat.capacity"] == {"value": None, "source": "default"}
    assert told["models.chat.options.since"]["value"] == "2024-01-01"
    assert told["models.chat.options.most"]["value"] == "inf"
    assert told["models.chat.inputs"] == {"value": [{"name": "x", "shape": [-1, 2]}], "source": "everywire.toml:15"}


def test_a_source_cannot_leave_its_comment(directory: Path) -> None:
    file = directory / "a\nb = 1"
    file.write_text("[listen]\nport = 1")
    printed = to_toml(resolve(file=file, environ={}, overrides={}))
    assert "b = 1\n" not in printed.replace("\\nb = 1", "")


# ---- lines ----


def test_each_key_of_a_file_has_the_line_that_it_stands_on() -> None:
    text = """# a comment
limits.head = 1

[listen]   # another
"port" = 1
host = '''
a # not a comment
[limits]
'''
[models."llama-3.1"]
options = { a = 1, b.c = [
  1,
] }
[[models.m.inputs]]
name = "x"
[[models.m.inputs]]
name = "y"
"""
    wanted = {
        ("limits",): 2, ("limits", "head"): 2, ("listen",): 4, ("listen", "port"): 5, ("listen", "host"): 6,
        ("models", "llama-3.1"): 10, ("models", "llama-3.1", "options"): 11,
        ("models", "llama-3.1", "options", "a"): 11, ("models", "llama-3.1", "options", "b"): 11,
        ("models", "llama-3.1", "options", "b", "c"): 11, ("models", "m", "inputs"): 14,
        ("models", "m", "inputs", "name"): 15,
    }  # fmt: skip
    assert lines_of(text) == wanted
    assert lines_of(text.replace("\n", "\r\n")) == wanted


def test_behind_a_very_long_value_no_line_is_told_and_no_time_lost() -> None:
    assert lines_of("a = 1\nb = [\n" + "1,\n" * 50_000 + "]\nc = 1\n") == {("a",): 1}


def test_an_error_names_the_line(directory: Path) -> None:
    (directory / "everywire.toml").write_text("[limits]\nhead = 1\nhead_timeout = 0\n")
    with pytest.raises(ConfigError, match=r"^everywire\.toml:3: limits\.head_timeout must be"):
        load(file=Path("everywire.toml"), environ={}, overrides={})
    (directory / "everywire.toml").write_text("[listen]\nport = 0\n\n[tls]\ncert = 'a'\n")
    with pytest.raises(ConfigError, match=r"^tls\.cert \(everywire\.toml:5\) is set and tls\.key is not"):
        load(file=Path("everywire.toml"), environ={}, overrides={})


# ---- all that is wrong ----


def problems(file: str = "", environ: Mapping[str, str] | None = None, **overrides: Any) -> list[Problem]:
    Path("everywire.toml").write_text(file)
    with pytest.raises(ConfigError) as caught:
        load(file=Path("everywire.toml"), environ=environ or {}, overrides=overrides)
    assert str(caught.value).startswith(caught.value.problems[0].text)
    return list(caught.value.problems)


def test_everything_wrong_is_told_at_once_with_what_is_known_of_it(directory: Path) -> None:
    found = problems(
        "[limits]\nhaed = 5\nbody = 'x'\n[models.a]\ncapacity = 2\n[models.b]\nfactory = 3\n",
        {
            "EVERYWIRE_LISTEN__PORT": "http",
            "EVERYWIRE_DEBUG": "1",
            "OPTION_TGI_COMPAT": "yes",
            "OPTION_BEDROCK_COMPAT": "true",
        },
        **{"log.level": "loud"},
    )
    size = 'a number of bytes, at least 1, such as 65536, "64 KiB" or "1GiB"'
    assert [(p.where, p.key, p.expected, p.got, p.suggestion) for p in found] == [
        ("everywire.toml:2", "limits.haed", "a setting", "", "limits.head"),
        ("everywire.toml:3", "limits.body", size, "'x'", ""),
        ("everywire.toml:7", "models.b.factory", '"module:attribute", or the name of a library model', "3", ""),
        ("EVERYWIRE_DEBUG", "", "a setting", "", ""),
        ("EVERYWIRE_LISTEN__PORT", "listen.port", "a whole number from -1 to 65535", "'http'", ""),
        ("--set log.level", "log.level", "one of debug, info, warning, error", "'loud'", ""),
        ("OPTION_BEDROCK_COMPAT", "", "false", "'true'", ""),
        ("OPTION_TGI_COMPAT", "lmi.tgi_compat", "true or false", "'yes'", ""),
        ("everywire.toml:5", "models.a.factory", '"module:attribute", or the name of a library model', "", ""),
    ]
    assert all(p.text.startswith(p.where) for p in found)


def test_contradictions_are_told_at_once_with_their_places(directory: Path) -> None:
    found = problems("[tls]\ncert = 'a'\n[listen]\nport = 1\nbidi_port = 1\n", {"SAGEMAKER_SAFE_PORT_RANGE": "5-6"})
    assert [(p.where, p.key) for p in found] == [
        ("everywire.toml:2", "tls.cert"),
        ("everywire.toml:4", "listen.port"),
        ("everywire.toml:5", "listen.bidi_port"),
        ("", "listen.tls_port"),
    ]


def test_the_line_for_the_operator_says_how_many_more_there_are(directory: Path) -> None:
    (directory / "everywire.toml").write_text("[limits]\nhaed = 5\nbody = 'x'\n")
    with pytest.raises(ConfigError) as caught:
        load(file=Path("everywire.toml"), environ={}, overrides={})
    assert str(caught.value) == (
        "everywire.toml:2: limits.haed is not a setting: did you mean limits.head? "
        "(and 1 more: `everywire config check` has all)"
    )


def test_a_wrong_value_is_not_covered_by_a_default_of_the_container(directory: Path) -> None:
    found = problems("[listen]\nport = 'x'\n", {"SAGEMAKER_BIND_TO_PORT": "y"})
    assert [p.where for p in found] == ["everywire.toml:2"]


# ---- the JSON schema ----


SCHEMA = json_schema()


def wrong_for_the_schema(text: str) -> list[str]:
    """The places where it finds something wrong."""
    errors = jsonschema.Draft7Validator(SCHEMA).iter_errors(tomllib.loads(text))
    return sorted(".".join(map(str, error.absolute_path)) for error in errors)


def test_the_json_schema_is_one_and_the_file_is_current() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    file = ROOT / "docs/reference/everywire.schema.json"
    assert json.loads(file.read_text(encoding="utf-8")) == SCHEMA, "run scripts/write_configuration_reference.py"


def test_the_json_schema_says_of_each_setting_what_it_means_and_what_it_may_be() -> None:
    for path, setting in SETTINGS.items():
        node: Any = SCHEMA
        for name in path:
            node = next(iter(node["patternProperties"].values())) if name == "*" else node["properties"][name]
        meaning, expected, *computed = node["description"].split("\n")
        assert meaning
        assert expected == f"Must be {setting.expected}."
        assert computed == ([f"Default: {setting.computed}."] if setting.computed else [])
        assert ("default" in node) == (setting.default is not None and not setting.computed)
    assert "null" not in json.dumps(SCHEMA["properties"])


# those of the documentation are whole files
TOMLS = [
    block.text
    for page in sorted((ROOT / "docs").rglob("*.md"))
    for block in blocks(str(page.relative_to(ROOT)))
    if block.language == "toml" and block.file == "everywire.toml"
]


@pytest.mark.parametrize("text", TOMLS)
def test_the_files_in_the_documentation_are_right_for_the_json_schema(text: str) -> None:
    assert wrong_for_the_schema(text) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[limits]\nhaed = 5", ["limits"]),
        ("[limits]\nhead = '64 Kib'\nbody = '1 XB'\nfields = 0", ["limits.body", "limits.fields"]),
        ("[limits]\nhead_timeout = 0\nkeep_alive = '5 min'\nwrite_stall = 0\nbody_silence = 'x'", ["limits.body_silence", "limits.head_timeout"]),
        ("[log]\nlevel = 'loud'", ["log.level"]),
        ("[models.m]\ncapacity = 1", ["models.m"]),
        ("[models.'a b']\nfactory = 'a:b'", ["models"]),
        ("[models.m]\nfactory = 'a.py'\ninputs = [{name = 'x', type = 'FP32'}]", ["models.m.factory", "models.m.inputs.0"]),
        ("[models.m]\nfactory = 'a:b'\noptions = {a = 1}\n[models.m.restart]\njitter = 2", ["models.m.restart.jitter"]),
        ("[endpoints.e.variants.v]\nweight = 1", ["endpoints.e.variants.v"]),
        ("[repository]\nroots = '/srv'", ["repository.roots"]),
        ("[models.m]\nfactory = 'a:b'\n[models.m.process]\ninstances = 0\ndevices = [0]\nlop = 'x'\nloop = 'x'", ["models.m.process", "models.m.process.devices.0", "models.m.process.instances", "models.m.process.loop"]),
        ("[models.m]\nfactory = 'a:b'\nprocess.environment = {EVERYWIRE_A = '', B-C = '', D = 1}", ["models.m.process.environment", "models.m.process.environment", "models.m.process.environment.D"]),
        ("tls.dev = 'yes'", ["tls.dev"]),
    ],
)  # fmt: skip
def test_what_the_json_schema_finds_wrong(directory: Path, text: str, wrong: list[str]) -> None:
    assert wrong_for_the_schema(text) == wrong
    assert complaint(file=text)


@given(st.data())
@settings(max_examples=100)
def test_whatever_may_be_set_in_a_file_is_right_for_the_json_schema(data: st.DataObject) -> None:
    overrides: dict[str, Any] = {}
    for path in data.draw(st.lists(st.sampled_from(list(SETTINGS)), max_size=6, unique=True)):
        key, complete = with_names(SETTINGS[path])
        overrides |= {**complete, key: data.draw(values(SETTINGS[path]))}
    with contextlib.suppress(ConfigError):
        assert wrong_for_the_schema(to_toml(resolve(file=None, environ={}, overrides=overrides))) == []


# ---- the page ----


def test_the_reference_is_current_and_explains_every_setting_once() -> None:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "write_configuration_reference.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["reference"] = script
    spec.loader.exec_module(script)
    pages: dict[Path, str] = script.pages()
    written = {file: file.read_text(encoding="utf-8") for file in (ROOT / "docs/reference").glob("configuration*.md")}
    assert written == pages, "run scripts/write_configuration_reference.py"
    index = pages.pop(script.INDEX)
    tables = {path[:-1]: index.partition(f"\n### [{spelt(path[:-1])}]\n")[2].partition("\n#")[0] for path in SETTINGS}
    assert [path for path in SETTINGS if f"`{path[-1]}`" not in tables[path[:-1]]] == []
    text = "\n".join(pages.values())
    assert "|  |" not in text
    assert text.count("\n| `") == len([path for path in SETTINGS if path[:2] != ("repository", "process")])


def test_no_page_of_the_reference_is_longer_than_a_reader_looks_through() -> None:
    for page in (ROOT / "docs/reference").glob("configuration*.md"):
        assert len([word for word in page.read_text(encoding="utf-8").split() if word.strip("|-")]) <= 2500, page


def test_a_setting_is_a_value() -> None:
    port = SETTINGS["listen", "port"]
    assert port.expected == "a whole number from -1 to 65535"
    assert dataclasses.replace(port, high=math.inf).expected == "a whole number, at least -1"
