"""The command line teaches, fails in one line, and hands a configuration to the server."""

from __future__ import annotations

import errno
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.cli import main
from gateway.cli.main import program
from gateway.cli.shadowing import PACKAGES, check_shadowing
from gateway.config import Config, ModelConfig
from gateway.config.fields import SETTINGS
from gateway.config.load import PREFIX
from gateway.config.problem import ConfigError
from gateway.config.tree import Unit
from gateway.net.listeners import CannotListen, Port, Rules, open_listeners
from models.messages import Family
from models.spec import Batching, TensorSpec

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working directory and an environment without anything of ours, and logging and signals put back."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith((PREFIX, "SAGEMAKER_"))]:
        monkeypatch.delenv(name)
    root, ours = logging.getLogger(), logging.getLogger("gateway")
    handlers, level = list(root.handlers), ours.level
    signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in signals.items():
        signal.signal(number, handler)
    root.handlers[:] = handlers
    ours.setLevel(level)


class Served:
    """Stands for the server: keeps what it was asked to serve."""

    def __init__(self) -> None:
        self.configs: list[Config] = []
        self.status = 0
        self.error: Exception | None = None

    def run(self, config: Config, **_: Any) -> int:
        self.configs.append(config)
        for handler in logging.getLogger().handlers:
            handler.flush()  # as at the end of a process
        if self.error:
            raise self.error
        return self.status


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    server = Served()
    replace_module(monkeypatch, "gateway.cli.serve", run=server.run)
    return server


def replace_module(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


def run(*arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(program, list(arguments), env=environ)


def failure(*arguments: str, **environ: str) -> str:
    result = run(*arguments, **environ)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    (line,) = result.output.splitlines()
    return line.removeprefix("Error: ")


# ---- serving ----


@pytest.mark.parametrize("command", [[], ["serve"]])
def test_it_serves_with_or_without_the_command(served: Served, command: list[str]) -> None:
    result = run("--port", "9000", "--model", "lm=app:lm", *command)
    assert result.exit_code == 0, result.output
    (config,) = served.configs
    assert config.listen.port == 9000
    assert config.models == {"lm": ModelConfig(factory="app:lm")}


def test_the_exit_status_is_the_servers(served: Served) -> None:
    served.status = 3
    assert run().exit_code == 3


def test_every_flag_reaches_its_setting(served: Served) -> None:
    run(
        *("--host", "0.0.0.0", "--port", "1", "--tls-port", "2", "--tls-cert", "c.pem", "--tls-key", "k.pem"),
        *("--log-level", "error", "--log-format", "text", "--set", "limits.body=64 MiB", "--set", "lmi.default_model=a"),
        *("--model", "a=m:a", "--model", "llama-3.1=m:b", "--set", 'models."llama-3.1".options.equation=x=y'),
    )
    (config,) = served.configs
    assert (config.listen.host, config.listen.port, config.listen.tls_port) == ("0.0.0.0", 1, 2)
    assert (config.tls.cert, config.tls.key, config.tls.dev) == ("c.pem", "k.pem", False)
    assert (config.log.level, config.log.format) == ("error", "text")
    assert (config.limits.body, config.lmi.default_model) == (64 * 2**20, "a")
    assert config.models["llama-3.1"] == ModelConfig(factory="m:b", options={"equation": "x=y"})


def test_flags_override_the_environment_and_the_environment_the_file(served: Served, tmp_path: Path) -> None:
    (tmp_path / "everywire.toml").write_text("[listen]\nport = 1\nbacklog = 1\nhost = '::1'\n")
    run(
        *("--config", "everywire.toml", "--port", "3"),
        EVERYWIRE_LISTEN__PORT="2",
        EVERYWIRE_LISTEN__BACKLOG="2",
        SAGEMAKER_BIND_TO_PORT="4",
    )
    listen = served.configs[0].listen
    assert (listen.port, listen.backlog, listen.host) == (3, 2, "::1")


def test_the_development_certificate_is_made_and_its_ca_is_named_in_the_log(served: Served, tmp_path: Path) -> None:
    result = run("--tls-dev", "--set", "tls.dev_dir=tls", "--model", "a=m:a")
    assert served.configs[0].tls.dev
    line = json.loads(result.output)
    assert line["SSL_CERT_FILE"] == f"{tmp_path}/tls/ca.pem"
    assert (tmp_path / "tls" / "ca.pem").exists()


def test_a_model_without_a_name_has_that_of_its_attribute(served: Served) -> None:
    run("--model", "app:chat", "--model", "app:Chat.load")
    assert served.configs[0].models == {
        "chat": ModelConfig(factory="app:chat"),
        "Chat": ModelConfig(factory="app:Chat.load"),
    }


def test_a_file_stands_for_its_one_model(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "one_of_mine.py").write_text("def chat(prompt: str) -> str:\n    return prompt\n")
    result = run("--model", "one_of_mine.py", "--set", "models.chat.capacity=2")
    assert result.exit_code == 0, result.output
    assert served.configs[0].models == {"chat": ModelConfig(factory="one_of_mine:chat", capacity=2)}
    message = failure("--model", "chat=app:f", "--model", "one_of_mine.py")
    assert message == "models.chat.factory is set twice: by --model chat and by --model one_of_mine.py"


# ---- errors ----

TAKES = "--model takes NAME=MODULE:ATTR, MODULE:ATTR or FILE.py"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "http"], "--port: listen.port must be a whole number from -1 to 65535, not 'http'"),
        (["--log-level", "loud"], "--log-level: log.level must be one of debug, info, warning, error, not 'loud'"),
        (["--set", "limits.haed=1"], "--set limits.haed: limits.haed is not a setting: did you mean limits.head?"),
        (["--set", "limits.head"], "--set takes SECTION.KEY=VALUE, such as limits.body=64MiB, not 'limits.head'"),
        (["--model", "app"], f"{TAKES}, such as chat=app:generate, not 'app'"),
        (["--model", "app:"], f"{TAKES}, such as chat=app:generate, not 'app:'"),
        (["--model", ":f"], f"{TAKES}, such as chat=app:generate, not ':f'"),
        (["--model", "=app:f"], f"{TAKES}, such as chat=app:generate, not '=app:f'"),
        (["--model", "app.py"], "app.py: no such file"),
        (
            ["--model", "a=app.py"],
            "--model a: models.a.factory must be \"module:attribute\", or the name of a library model, not 'app.py'",
        ),
        (
            ["--model", "a b=m:f"],
            "--model a b: 'a b' cannot be the name of a model: 1 to 128 letters, digits, '.', '_' and '-', "
            "beginning with a letter, a digit or '_'",
        ),
        (["--port", "1", "--set", "listen.port=2"], "listen.port is set twice: by --port and by --set listen.port"),
        (["--model", "a=m:f", "--model", "a=m:g"], "models.a.factory is set twice: by --model a and by --model a"),
        (["--config", "missing.toml"], "missing.toml: cannot be read: No such file or directory"),
        (["--tls-cert", "c.pem"], "tls.cert (--tls-cert) is set and tls.key is not: a certificate needs its key"),
    ],
)
def test_a_wrong_setting_is_one_clear_line_and_nothing_is_served(served: Served, arguments: list[str], message: str) -> None:
    assert failure(*arguments) == message
    assert served.configs == []


def test_a_wrong_variable_is_one_clear_line(served: Served) -> None:
    assert failure(EVERYWIRE_LISTEN__PORT="x").startswith("EVERYWIRE_LISTEN__PORT: listen.port must be")


@pytest.mark.parametrize("arguments", [["--prot", "1"], ["sevre"], ["serve", "--prot", "1"], ["demo", "--port", "x"]])
def test_a_wrong_command_line_is_one_line_without_the_usage(served: Served, arguments: list[str]) -> None:
    assert arguments[-2 if len(arguments) > 1 else 0] in failure(*arguments)


def test_a_group_of_commands_alone_says_what_it_takes() -> None:
    assert failure("emulate").startswith("emulate takes the name of a front, such as sagemaker")


def test_a_trace_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    message = failure("simulate", "--seeds", "0..0", "--trace", "missing/trace.txt")
    assert message == "--trace missing/trace.txt cannot be written: No such file or directory"


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (errno.EADDRINUSE, "Address already in use; listen.port or --port sets another"),
        (
            errno.EACCES,
            "Permission denied; a port below 1024 needs root or CAP_NET_BIND_SERVICE; listen.port or --port sets another",
        ),
        (errno.EADDRNOTAVAIL, "Cannot assign requested address; listen.host or --host sets an address of this machine"),
    ],
)
def test_a_port_that_cannot_be_had_ends_with_1_and_the_log_says_what_to_change(
    raised: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create_server(address: Any, **_: Any) -> None:
        raise OSError(raised, f"{os.strerror(raised)} (while attempting to bind on address {address!r})")

    monkeypatch.setattr("socket.create_server", create_server)
    result = run("--port", "80", "--log-format", "json", "--model", "a=models.library.echo:Echo")
    assert result.exit_code == 1
    told = json.loads(result.output.splitlines()[-1])
    assert (told["event"], told["reason"]) == ("cannot serve", f"cannot listen on 127.0.0.1:80: {message}")


def test_a_host_that_is_none_is_told_as_the_resolver_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: Any, **__: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    with pytest.raises(CannotListen) as caught:
        open_listeners("x", [Port(number=1, setting="listen.port")], Rules(backlog=1))
    assert str(caught.value) == (
        "cannot listen on x: Name or service not known; listen.host or --host sets an address of this machine"
    )


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_what_the_server_finds_wrong_with_the_configuration_is_one_line_too(served: Served, depth: int) -> None:
    served.error = ConfigError("models.a: app has no attribute 'f'")
    for _ in range(depth):
        served.error = ExceptionGroup("of a nursery", [served.error])
    assert failure("--model", "a=app:f") == "models.a: app has no attribute 'f'"


@pytest.mark.parametrize("others", [[ValueError("ours")], [ConfigError("theirs"), ValueError("ours")]])
def test_a_bug_of_the_server_is_not_taken_for_a_configuration_error(served: Served, others: list[Exception]) -> None:
    served.error = ExceptionGroup("of a nursery", others)
    result = run()
    assert result.exit_code == 1
    assert result.exception is served.error


# ---- help ----


def test_help_teaches_by_example_and_shows_defaults() -> None:
    result = run("--help")
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    for shown in (
        "[default: 8080]",
        "[default: 127.0.0.1]",
        "[default: info]",
        "everywire --model chat=app:generate",
        "EVERYWIRE_SECTION__KEY=VALUE",
    ):
        assert shown in text
    assert max(map(len, result.output.splitlines())) <= 100
    assert "..." not in text.partition("Options:")[2]


def test_every_command_has_help() -> None:
    assert "[default: none is sent" in " ".join(run("emulate", "sagemaker", "--help").output.split())
    for command in ("serve", "demo", "config", "models", "emulate", "simulate", "call"):
        assert run(command, "--help").exit_code == 0
        assert f"  {command} " in run("-h").output


def test_every_command_teaches_by_example() -> None:
    paths: list[list[str]] = [[]]
    while paths:
        path = paths.pop()
        command: Any = program
        for name in path:
            command = command.commands[name]
        paths += [[*path, name] for name in getattr(command, "commands", {}) if name != "models"]
        text = run(*path, "--help").output
        assert "\nExamples:\n" in text.replace("  Examples:", "Examples:"), path
        assert max(map(len, text.splitlines())) <= 100


def test_the_version_is_that_of_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--version").output.startswith("everywire, version ")
    installed = main.version.__wrapped__  # which is asked once in a process
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"1.2.3 of {name}")
    assert installed() == "1.2.3 of everywire"

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", absent)
    assert installed() == "0+source"


# ---- config ----


def test_config_prints_what_is_in_force_and_where_it_was_set(tmp_path: Path) -> None:
    (tmp_path / "everywire.toml").write_text('[models.lm]\nfactory = "app:lm"\n')
    result = run("--config", "everywire.toml", "--port", "9000", "config", EVERYWIRE_LIMITS__HEAD="16 KiB")
    assert result.exit_code == 0
    assert "port = 9000  # --port\n" in result.output
    assert 'head = "16 KiB"  # EVERYWIRE_LIMITS__HEAD\n' in result.output
    assert 'factory = "app:lm"  # everywire.toml:2\n' in result.output
    assert tomllib.loads(result.output)["listen"] == {
        "host": "127.0.0.1", "port": 9000, "tls_port": 8443, "bidi_port": -1, "grpc_port": -1,
            "unix_mode": "660", "trusted_proxies": [],
        "backlog": 2048, "tcp_keepalive": 60.0, "processes": 1,
    }  # fmt: skip


def test_config_shows_what_sagemaker_sets() -> None:
    result = run("config", SAGEMAKER_BIND_TO_PORT="8099", SAGEMAKER_MULTI_MODEL="true")
    assert 'host = "0.0.0.0"  # SAGEMAKER_BIND_TO_PORT\nport = 8099  # SAGEMAKER_BIND_TO_PORT\n' in result.output
    assert "timeout = 20.0  # SAGEMAKER_BIND_TO_PORT\n" in result.output
    assert "multi_model = true  # SAGEMAKER_MULTI_MODEL\n" in result.output


def test_config_says_that_the_library_is_served_where_nothing_else_is() -> None:
    first = run("config").output.splitlines()[0]
    assert first == "# No model is configured: those of the library are served."


def test_config_fails_as_serving_would() -> None:
    assert failure("--port", "x", "config").startswith("--port: listen.port must be")


def test_config_shows_what_was_changed_alone_and_masks_secrets() -> None:
    environ = {"EVERYWIRE_MODELS__m__OPTIONS__api_key": "sk-1", "EVERYWIRE_MODELS__m__FACTORY": "a:b"}
    result = run("config", "show", "--changed", **environ)
    assert result.output == (
        '[models.m]\nfactory = "a:b"  # EVERYWIRE_MODELS__m__FACTORY\n\n[models.m.options]\n'
        'api_key = "********"  # EVERYWIRE_MODELS__m__OPTIONS__api_key, masked: --show-secrets shows it\n'
    )
    kept = run("config", "show", "--show-secrets", **environ)
    assert (kept.exit_code, "sk-1" in kept.output) == (2, False)
    assert "--show-secrets is for a terminal alone" in kept.output


@pytest.mark.programs
def test_secrets_are_shown_on_a_terminal_alone(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    environ = {"EVERYWIRE_MODELS__m__OPTIONS__api_key": "sk-1", "EVERYWIRE_MODELS__m__FACTORY": "a:b"}
    with os.fdopen(ours, "rb") as terminal:
        command = [sys.executable, "-m", "gateway", "config", "show", "--changed", "--show-secrets"]
        subprocess.run(command, cwd=tmp_path, env=os.environ | environ, stdout=theirs, check=True, timeout=60)
        os.close(theirs)
        assert b'api_key = "sk-1"  #' in os.read(terminal.fileno(), 65536)


def test_config_is_shown_to_programs() -> None:
    told = json.loads(run("config", "show", "--json", "--port", "9000").output)
    assert told["listen.port"] == {"value": 9000, "source": "--port"}
    assert told["listen.host"] == {"value": "127.0.0.1", "source": "default"}
    # settings that hold variables have one entry a variable, here none
    assert len(told) == sum("*" not in path and setting.unit is not Unit.VARIABLES for path, setting in SETTINGS.items())


def test_the_options_of_a_configuration_stand_before_a_command_of_it_or_behind(served: Served, tmp_path: Path) -> None:
    (tmp_path / "everywire.toml").write_text("[listen]\nbacklog = 7\n")
    orders: list[tuple[list[str], list[str]]] = [
        (["--config", "everywire.toml", "--port", "1"], []),
        (["--port", "1"], ["--config", "everywire.toml"]),
        ([], ["--config", "everywire.toml", "--port", "1"]),
    ]
    for before, behind in orders:
        assert run(*before, "serve", *behind).exit_code == 0
        told = json.loads(run(*before, "config", "show", "--changed", "--json", *behind).output)
        assert {key: one["value"] for key, one in told.items()} == {"listen.port": 1, "listen.backlog": 7}
    assert {(config.listen.port, config.listen.backlog) for config in served.configs} == {(1, 7)}
    shown = run("config", *orders[2][1], "show", "--changed").output
    assert shown.endswith("[listen]\nport = 1  # --port\nbacklog = 7  # everywire.toml:2\n")


def test_what_stands_on_both_sides_of_a_command_is_given_twice(served: Served) -> None:
    assert failure("--port", "1", "serve", "--port", "2") == "listen.port is set twice: by --port and by --port"
    assert failure("--config", "a", "serve", "--config", "b") == "--config is given twice: a and b"
    assert failure("models", "--port", "1") == "--port stands before the command: everywire --port ... models"
    assert served.configs == []


BROKEN = "[limits]\nhaed = 5\nfields = 0\n[models.m]\n"


def test_check_names_all_that_is_wrong_each_on_a_line(tmp_path: Path) -> None:
    (tmp_path / "everywire.toml").write_text(BROKEN)
    result = run("config", "check", "--config", "everywire.toml", "--port", "x")
    assert result.exit_code == 2
    assert result.output.splitlines() == [
        "everywire.toml:2: limits.haed is not a setting: did you mean limits.head?",
        "everywire.toml:3: limits.fields must be a whole number, at least 1, not 0",
        "--port: listen.port must be a whole number from -1 to 65535, not 'x'",
        'everywire.toml:4: models.m has no factory, which must be "module:attribute", or the name of a library model',
    ]
    told = json.loads(run("config", "check", "--config", "everywire.toml", "--json").output)
    assert told["ok"] is False
    assert told["problems"][0] == {
        "text": "everywire.toml:2: limits.haed is not a setting: did you mean limits.head?", "where": "everywire.toml:2",
        "key": "limits.haed", "expected": "a setting", "got": "", "suggestion": "limits.head",
    }  # fmt: skip


def test_check_looks_at_the_files_that_are_named(tmp_path: Path) -> None:
    result = run(
        *("config", "check", "--json", "--tls-cert", "c.pem", "--tls-key", "k.pem"),
        *("--set", "sagemaker.sigv4.credentials=keys.ini", "--set", "drain.report=missing/report.json"),
        *("--set", "operator.port=0", "--set", "operator.token_file=tokens"),
        *("--set", "metrics.port=0", "--set", "metrics.token_file=others"),
    )
    assert result.exit_code == 2
    assert [(p["key"], p["where"], p["text"]) for p in json.loads(result.output)["problems"]] == [
        ("tls.cert", "--tls-cert", "tls.cert: c.pem cannot be read: No such file or directory"),
        (
            "sagemaker.sigv4.credentials",
            "--set sagemaker.sigv4.credentials",
            "sagemaker.sigv4.credentials: keys.ini cannot be read: No such file or directory",
        ),
        (
            "operator.token_file",
            "--set operator.token_file",
            "operator.token_file: 'tokens' cannot be read: No such file or directory",
        ),
        (
            "metrics.token_file",
            "--set metrics.token_file",
            "metrics.token_file: 'others' cannot be read: No such file or directory",
        ),
        (
            "drain.report",
            "--set drain.report",
            "drain.report: missing/report.json cannot be written: missing is no folder that it can be made in",
        ),
    ]


def test_check_imports_models_where_it_is_asked_to(tmp_path: Path) -> None:
    (tmp_path / "raising_at_check.py").write_text("1 / 0\n")
    arguments = ["config", "check", "--model", "a=raising_at_check:f", "--model", "b=json:nothing"]
    assert run(*arguments).output == "No setting is wrong. The models are not imported: --import looks at them too.\n"
    result = run(*arguments, "--import")
    assert result.exit_code == 2
    first, second = result.output.splitlines()
    assert first.startswith("models.a.factory: cannot import 'raising_at_check': ZeroDivisionError: division by zero")
    assert second.startswith("models.b.factory: 'json' has no 'nothing'")


def test_a_module_that_wants_to_leave_or_says_much_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "leaving_at_check.py").write_text("import sys\nsys.exit('bye')\n")
    (tmp_path / "saying_much_at_check.py").write_text("raise ImportError('one\\n  two\\n')\n")
    arguments = ["--model", "a=leaving_at_check:f", "--model", "b=saying_much_at_check:f"]
    result = run("config", "check", *arguments, "--import")
    assert result.exit_code == 2
    assert result.output.splitlines() == [
        f"models.a.factory: cannot import 'leaving_at_check': SystemExit: bye ({tmp_path}/leaving_at_check.py, line 2)",
        f"models.b.factory: cannot import 'saying_much_at_check': ImportError: one two ({tmp_path}/saying_much_at_check.py, line 1)",
    ]


def test_check_composes_what_is_served_where_each_model_is_right(tmp_path: Path) -> None:
    arguments = ["config", "check", "--import", "--model", "a=models.library.echo:Echo"]
    assert run(*arguments).exit_code == 0
    result = run(*arguments, "--set", "openai.default_model=nobody")
    assert result.exit_code == 2
    assert "openai.default_model" in result.output


def test_the_schema_is_printed_as_it_is_published() -> None:
    published = (ROOT / "docs/reference/everywire.schema.json").read_text(encoding="utf-8")
    assert run("config", "schema").output == published


# ---- models ----


LIBRARY = ["echo", "identity", "add_sub", "lm", "speech"]


TENSORS: dict[str, Any] = {
    "inputs": None, "outputs": None, "max_batch_size": 0, "decoupled": False, "pieces": False, "batching": None,
}  # fmt: skip


def load_spec(name: str, config: ModelConfig) -> SimpleNamespace:
    match config.factory:
        case "app:broken":
            raise ZeroDivisionError("division by zero\nand more")
        case "app:silent":
            raise AssertionError
        case "app:missing":
            raise ConfigError("models.missing.factory: cannot import 'app'")
    return SimpleNamespace(family=Family.TENSOR, capacity=config.capacity, **TENSORS)


@pytest.fixture
def _loading(monkeypatch: pytest.MonkeyPatch) -> None:
    library = [SimpleNamespace(name=name, family=Family.TEXT, capacity=9) for name in LIBRARY]
    replace_module(monkeypatch, "gateway.catalog.factories", load_spec=load_spec, library_specs=lambda: library)


@pytest.mark.usefixtures("_loading")
def test_models_lists_what_would_be_served() -> None:
    result = run("--model", "mine=app:f", "--set", "models.mine.capacity=2", "models")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows == [
        ["NAME", "FAMILY", "CAPACITY", "FROM", "TENSORS"],
        ["mine", "tensor", "2", "app:f", "any", "->", "any"],
    ]
    assert result.output.startswith("Configured here (no server was asked; everywire models list asks one):\nNAME ")


@pytest.mark.usefixtures("_loading")
def test_models_lists_the_library_where_no_model_is_configured() -> None:
    rows = [line.split() for line in run("models").stdout.splitlines()]
    assert rows[1:] == [[name, "text", "9", "the", "library"] for name in LIBRARY]


@pytest.mark.usefixtures("_loading")
def test_models_lists_none_where_clients_load_them() -> None:
    result = run("--set", "sagemaker.multi_model=true", "models")
    assert (len(result.stdout.splitlines()), "Clients may load others." in result.stderr) == (1, True)


def test_models_lists_the_model_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.toml").write_text('factory = "echo"\n')
    settings = [f"--set=repository.{key}={tmp_path}" for key in ("roots", "model")]
    result = run(*settings, "--set=repository.model_name=mine", "models")
    assert result.exit_code == 0, result.output
    assert [line.split() for line in result.stdout.splitlines()][1:] == [["mine", "parts", "4096", str(tmp_path)]]


@pytest.mark.parametrize("way", ["file", "environment", "--set", "--model"])
def test_a_library_model_may_be_named_wherever_a_factory_is(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = []
    match way:
        case "file":
            (tmp_path / "everywire.toml").write_text('[models.mine]\nfactory = "lm"\n')
            arguments = ["--config", str(tmp_path / "everywire.toml")]
        case "environment":
            monkeypatch.setenv("EVERYWIRE_MODELS__mine__FACTORY", "lm")
        case "--set":
            arguments = ["--set", "models.mine.factory=lm"]
        case "--model":
            arguments = ["--model", "mine=lm"]
    result = run(*arguments, "models")
    assert result.exit_code == 0, result.output
    assert [line.split() for line in result.stdout.splitlines()][1:] == [["mine", "text", "256", "lm"]]


def test_a_name_that_the_library_has_not_is_refused_with_those_it_has() -> None:
    result = run("--model", "mine=ml", "models")
    said = "must be module:attribute, or the name of a library model, of which there are echo, identity, add_sub, lm, speech"
    assert (result.exit_code, said in result.output) == (2, True)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"inputs": (), "outputs": (TensorSpec(name="y", shape=()),)}, "none -> y any []"),
        (
            {"inputs": (TensorSpec(name="x", datatype="FP32", shape=(-1, 3)), TensorSpec(name="bias", optional=True))},
            "x FP32 [-1, 3], bias? any [...] -> any",
        ),
        (
            {"inputs": (TensorSpec(name="x", shape=(4,)),), "max_batch_size": 8, "decoupled": True},
            "x any [-1, 4] -> any (max_batch_size 8, decoupled)",
        ),
        ({"pieces": True}, "any -> any (pieces)"),
        ({"max_batch_size": 8, "batching": Batching()}, "any -> any (max_batch_size 8, batched)"),
    ],
)
def test_models_shows_what_a_model_of_tensors_declares(
    declared: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SimpleNamespace(family=Family.TENSOR, capacity=1, **TENSORS | declared)
    replace_module(monkeypatch, "gateway.catalog.factories", load_spec=lambda name, config: spec, library_specs=lambda: [])
    result = run("--model", "mine=app:f", "models")
    assert result.stdout.splitlines()[1] == f"mine  tensor  1         app:f  {said}"


@pytest.mark.usefixtures("_loading")
def test_models_names_each_that_cannot_be_loaded_and_why() -> None:
    names = {"bad": "app:broken", "worse": "app:silent", "missing": "app:missing"}
    result = run(*(f"--model={name}={factory}" for name, factory in names.items()), "models")
    assert result.exit_code == 2
    assert result.output.splitlines()[-1] == (
        "Error: models.bad cannot be loaded: ZeroDivisionError: division by zero; "
        "models.worse cannot be loaded: AssertionError: no reason given; models.missing.factory: cannot import 'app'"
    )
    assert "bad      -       -         app:broken" in result.output


def test_help_names_the_models_of_the_library() -> None:
    from gateway.catalog.factories import library_specs

    assert [spec.name for spec in library_specs()] == LIBRARY
    assert "echo, identity, add_sub, lm and speech" in " ".join(run("--help").output.split())


# ---- demo ----


def test_demo_hands_its_options_on_and_exits_with_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[bool, int]] = []

    def demo(*, once: bool, port: int, echo: Any) -> int:
        calls.append((once, port))
        echo("hello")
        return 4

    replace_module(monkeypatch, "gateway.cli.demo", run=demo)
    result = run("demo", "--once", "--port", "9000")
    assert (result.exit_code, result.output) == (4, "hello\n")
    run("demo")
    assert calls == [(True, 9000), (False, 0)]


def test_demo_refuses_the_flags_that_it_would_not_use() -> None:
    assert failure("--port", "1", "demo") == "demo takes only its own options, after its name: see `everywire demo --help`"


# ---- shadowing ----


def packages(directory: Path) -> Path:
    for name in PACKAGES:
        (directory / name).mkdir(parents=True)
        (directory / name / "__init__.py").touch()
    return directory


def test_an_ordinary_directory_shadows_nothing(tmp_path: Path) -> None:
    ours = packages(tmp_path / "ours")
    (tmp_path / "app.py").touch()
    assert check_shadowing(tmp_path, ours) is None
    assert check_shadowing(ours, ours) is None
    assert check_shadowing(ROOT, ROOT) is None


@pytest.mark.parametrize(
    ("made", "named"),
    [
        ("models/__init__.py", "models/"),
        ("models/mine.py", "models/"),
        ("models.py", "models.py"),
        ("gateway/__init__.py", "gateway/"),
        ("protocols.py", "protocols.py"),
    ],
)
def test_python_code_under_one_of_our_names_is_to_be_renamed(tmp_path: Path, made: str, named: str) -> None:
    ours = packages(tmp_path / "ours")
    theirs = tmp_path / "theirs"
    (theirs / made).parent.mkdir(parents=True)
    (theirs / made).touch()
    message = check_shadowing(theirs, ours)
    assert message is not None
    assert message.startswith(f"{theirs}/{named} and everywire's own package")
    assert "rename yours, or start in another directory" in message


def test_a_folder_of_weights_shadows_nothing(tmp_path: Path) -> None:
    ours = packages(tmp_path / "ours")
    theirs = tmp_path / "theirs"
    (theirs / "models" / "llama").mkdir(parents=True)
    (theirs / "models" / "llama.bin").touch()
    assert check_shadowing(theirs, ours) is None


@pytest.mark.parametrize("command", [[], ["serve"], ["demo"], ["models"]])
def test_a_shadow_stops_the_start(served: Served, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "models.py").touch()
    assert failure(*command).startswith(f"{tmp_path}/models.py and everywire's own package 'models' have the same name")
    assert served.configs == []


# ---- as a process ----


@pytest.mark.programs
def test_a_folder_that_python_would_import_in_place_of_ours_is_named_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("raise RuntimeError('mine')")
    done = subprocess.run(
        [sys.executable, "-m", "gateway"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"Error: {tmp_path}/models/ and everywire's own package 'models' have the same name")
