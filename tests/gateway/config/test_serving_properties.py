"""LMI's own configuration: serving.properties in a model's folder, OPTION_* in the environment, and which of them wins."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.catalog import served_folder
from gateway.catalog.factories import LIBRARY
from gateway.catalog.folder import ModelFolder, forget, make_spec, read_folder
from gateway.cli import serve
from gateway.config import Config, LMIConfig, ModelConfig, RepositoryConfig
from gateway.config.environment import OPTIONS, PREFIX, UNSERVED
from gateway.config.load import resolve
from gateway.config.problem import ConfigError
from gateway.config.properties import KNOWN, parse_properties, read_properties, text_options
from gateway.config.show import to_toml
from gateway.config.tree import KiB, MiB
from gateway.errors import BadModel
from gateway.gateway import Gateway
from models.adapt import spec_of
from models.spec import ModelSpec
from tests.docs.pages import ROOT

MODULE = "everywire_model_of_a_properties_test"

# ---- the format: each expectation is what java.util.Properties.load of Java 17 gives ----


@pytest.mark.parametrize(
    ("document", "pairs"),
    [
        (b"", {}),
        (b"a=1\nb:2\nc 3\nd\t4\ne\f5\n", {"a": "1", "b": "2", "c": "3", "d": "4", "e": "5"}),
        (b"a = 1\rb :2\r\nc =: 3", {"a": "1", "b": "2", "c": ": 3"}),
        (b"a==1\nb = = 2\nc::3\nd:=4", {"a": "=1", "b": "= 2", "c": ":3", "d": "=4"}),
        (b"a=1 \t\n  b = 2  3\n", {"a": "1 \t", "b": "2  3"}),
        (b"a\nb=\nc \n", {"a": "", "b": "", "c": ""}),
        (b"=1", {"": "1"}),
        (b"a=1\na=2", {"a": "2"}),
        (b"# a=1\n ! b=2\n\n \t\f\nc=#3 ! 4", {"c": "#3 ! 4"}),
        (b"# no comment goes on \\\na=1", {"a": "1"}),
        (b"a=1\\\n   2\\\r\n\t3\nb=4", {"a": "123", "b": "4"}),
        (b"a=1\\\n# 2", {"a": "1# 2"}),
        (b"a=1\\\n\n2=3", {"a": "1", "2": "3"}),
        (b"a=1\\\\\nb=2\\\\\\\n3", {"a": "1\\", "b": "2\\3"}),
        (b"a\\\n  b=1", {"ab": "1"}),
        (b"\\\n# a comment still\na=1", {"a": "1"}),
        (b"a=1\\", {"a": "1"}),
        (b"a=1\\\n", {"a": "1"}),
        (b"\\", {"": ""}),
        (b"\\\r", {"": ""}),
        (b"\\\r\n", {}),
        (rb"a\=b\:c\ d=1", {"a=b:c d": "1"}),
        (rb"a=\t\n\r\f\\\q\"\=\ ", {"a": '\t\n\r\f\\q"= '}),
        (rb"\#a=\!b", {"#a": "!b"}),
        (rb"a=\u00e9\u20AC\ud83d\ude00", {"a": "é€😀"}),
        (rb"\u0061\u003d=\u00412", {"a=": "A2"}),
        (rb"a=\\u00zz", {"a": "\\u00zz"}),
        (rb"a=\ud83d", {"a": "\ud83d"}),
        (b"a=\xe9\x85\x0b\x00", {"a": "é\x85\x0b\x00"}),
        ("a=é".encode(), {"a": "Ã©"}),  # ISO-8859-1, as for DJL
    ],
)
def test_a_document_is_read_as_java_reads_it(document: bytes, pairs: dict[str, str]) -> None:
    assert parse_properties(document) == pairs


def test_text_is_read_with_all_its_characters() -> None:
    assert parse_properties("a=é€😀\n\u2028b\u00a0c=1") == {"a": "é€😀", "\u2028b\u00a0c": "1"}


@pytest.mark.parametrize(
    ("document", "told"),
    [
        (rb"a=\u12", r"line 1: \\u must be followed by four hexadecimal digits, not '\\\\u12'"),
        (b"# x\n\nb=1\\\n2\nc=3\\\n4\\u00zz5", r"line 5: \\u must be followed by .*, not '\\\\u00zz'"),
        (rb"\uu0041=1", r"line 1: .* not '\\\\uu004'"),
        (rb"a\u=0041", r"line 1: .* not '\\\\u'"),
    ],
)
def test_an_escape_that_is_none_is_told_with_its_line(document: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=f"^{told}$"):
        parse_properties(document)


_escapes = {"\t": "\\t", "\n": "\\n", "\r": "\\r", "\f": "\\f"} | {c: f"\\{c}" for c in "\\ =:#!"}


def stored(text: str) -> str:
    return "".join(_escapes.get(c) or (c if c.isascii() else _halves(c)) for c in text)


def _halves(character: str) -> str:
    return re.sub(r"(....)", r"\\u\1", character.encode("utf-16-be", "surrogatepass").hex())


@given(st.dictionaries(st.text(), st.text(), max_size=4), st.sampled_from(["=", ":", " ", " = ", "\t:\f"]))
def test_whatever_is_stored_with_its_escapes_is_read_back(pairs: dict[str, str], separator: str) -> None:
    document = "".join(f"{stored(key)}{separator}{stored(value)}\n" for key, value in pairs.items() if key)
    expected = {key: value for key, value in pairs.items() if key}
    assert parse_properties(document.encode("latin-1")) == expected


@given(st.lists(st.sampled_from(["\\", "\n", "\r", " ", "=", ":", "#", "a", "\\u0041", "\\t", "é"]), max_size=30))
def test_garbage_is_some_pairs_or_an_error(pieces: list[str]) -> None:
    text = "".join(pieces)
    try:
        pairs = parse_properties(text)
    except ValueError:
        pass
    else:
        assert parse_properties(text.encode("latin-1")) == pairs
        assert sum(len(key) + len(value) for key, value in pairs.items()) <= len(text)


@pytest.mark.parametrize("piece", [b"\\", b"\\\n", b"a\\\n", b"\n", b"a", b"=", b" ", b"\\u0041", b"a=1\n", b"\\\\\n"])
def test_a_document_of_the_largest_size_is_read_whatever_it_repeats(piece: bytes) -> None:
    parse_properties(piece * (64 * KiB // len(piece)))


# ---- options of a model that shape its answers ----


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, LMIConfig()),
        ({"output_formatter": "sse"}, LMIConfig(output_formatter="sse")),
        ({"output_formatter": " jsonlines_chat "}, LMIConfig(output_formatter="jsonlines_chat")),
        ({"tgi_compat": "True", "rolling_batch": "lmi-dist"}, LMIConfig(tgi_compat=True, rolling_batch="lmi-dist")),
        ({"rolling_batch": "disable", "enable_streaming": "huggingface"}, LMIConfig(rolling_batch="disable", enable_streaming=True)),
        ({"rolling_batch": "disable", "async_mode": "true"}, LMIConfig(rolling_batch="auto")),
        ({"rolling_batch": "disable", "async_mode": "false"}, LMIConfig(rolling_batch="disable")),
        ({"rolling_batch": "trtllm", "async_mode": "true"}, LMIConfig(rolling_batch="trtllm")),
        ({"output_formatter": "", "tgi_compat": " "}, LMIConfig()),
        ({"bedrock_compat": "false", "dtype": "fp16"}, LMIConfig()),
    ],
)  # fmt: skip
def test_an_option_is_a_setting_of_the_model(options: dict[str, str], said: LMIConfig) -> None:
    assert text_options(LMIConfig(), options) == said


def test_the_model_overrides_the_server_in_what_it_says_alone() -> None:
    server = LMIConfig(default_model="m", output_formatter="sse", tgi_compat=True, rolling_batch="trtllm", max_prompts=3)
    assert text_options(server, {}) is server
    assert text_options(server, {"tgi_compat": "false"}) == replace(server, tgi_compat=False)
    assert text_options(server, {"rolling_batch": "vllm"}) == replace(server, rolling_batch="vllm")


_BAD = [
    ("output_formatter", "foo", "must be one of json, jsonlines, sse, json_chat, jsonlines_chat, not 'foo'"),
    ("output_formatter", "SSE", "must be one of json, jsonlines, sse, json_chat, jsonlines_chat, not 'SSE'"),
    ("rolling_batch", "scheduler", "must be one of auto, vllm, lmi-dist, trtllm, disable, not 'scheduler'"),
    ("tgi_compat", "maybe", "must be true or false, not 'maybe'"),
    ("tgi_compat", "huggingface", "must be true or false, not 'huggingface'"),
    ("enable_streaming", "2", "must be true or false, not '2'"),
    ("bedrock_compat", "true", "must be false, not 'true': the schema that it asks for is not served here"),
]


@pytest.mark.parametrize(("option", "value", "told"), _BAD)
def test_a_value_that_cannot_be_is_told_with_its_key(option: str, value: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        text_options(LMIConfig(), {option: value})
    assert str(caught.value) == f"option.{option} {told}"


def test_a_long_value_is_cut_in_the_error() -> None:
    with pytest.raises(ConfigError) as caught:
        text_options(LMIConfig(), {"rolling_batch": "x" * 10_000})
    assert len(str(caught.value)) < 300


@given(st.dictionaries(st.sampled_from([*OPTIONS, *UNSERVED, "async_mode", "x"]), st.text(max_size=12)))
def test_options_end_in_a_section_or_its_error(options: dict[str, str]) -> None:
    try:
        said = text_options(LMIConfig(), options)
    except ConfigError:
        pass
    else:
        assert {f.name for f in fields(said) if getattr(said, f.name) != getattr(LMIConfig(), f.name)} <= set(OPTIONS)


# ---- the file in a model's folder ----


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.toml").write_text('factory = "echo"\n')
    return tmp_path


def read(folder: Path, text: str | bytes) -> ModelFolder:
    data = text if isinstance(text, bytes) else text.encode()
    (folder / "serving.properties").write_bytes(data)
    return read_folder(str(folder), code=[str(folder)], defaults=ModelConfig(factory=""), shown="m")


def made(folder: Path, text: str) -> ModelSpec:
    try:
        return make_spec(read(folder, text), "m", MODULE)
    finally:
        forget(MODULE)


def refusal(folder: Path, text: str | bytes) -> str:
    with pytest.raises(BadModel) as caught:
        read(folder, text)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_an_option_of_the_file_reaches_the_spec(folder: Path) -> None:
    spec = made(folder, "option.output_formatter=sse\noption.model_id=some/model\nengine=Python\n")
    assert spec.options == {"output_formatter": "sse", "model_id": "some/model"}
    assert text_options(LMIConfig(output_formatter="json"), spec.options).output_formatter == "sse"


def test_options_are_in_lower_case_with_their_values_as_they_are(folder: Path) -> None:
    spec = made(folder, "option.entryPoint=My.py \noption.TGI_Compat = true\noption.tgi_compat=false\nOption.x=1\n")
    assert spec.options == {"entrypoint": "My.py ", "tgi_compat": "false"}


def test_its_numbers_say_how_the_model_is_served(folder: Path) -> None:
    text = "job_queue_size=10\noption.max_rolling_batch_size=4\noption.model_loading_timeout=1500\nrequired_memory_mb=3\n"
    spec = made(folder, text)
    assert (spec.queue, spec.capacity, spec.load_timeout, spec.memory) == (10, 4, 1500, 3 * MiB)
    assert read(folder, text).need == 3 * MiB


def test_what_it_does_not_say_stays_as_it_was(folder: Path) -> None:
    spec, silent = (
        made(folder, "job_queue_size=10\nrequired_memory_mb=0\nbatch_size=8\nmax_batch_delay=\n"),
        made(folder, ""),
    )
    assert (spec.capacity, spec.load_timeout, spec.memory) == (LIBRARY["echo"].capacity, silent.load_timeout, 0)
    assert silent.options == {}
    assert silent.queue != 10


def test_model_toml_beside_it_comes_first(folder: Path) -> None:
    (folder / "model.toml").write_text('factory = "echo"\nqueue = 7\nmemory = "1 KiB"\n')
    spec = made(folder, "job_queue_size=10\nrequired_memory_mb=3\noption.max_rolling_batch_size=4\n")
    assert (spec.queue, spec.memory, spec.capacity) == (7, 1024, 4)


def test_it_comes_before_what_the_code_says_of_itself(folder: Path) -> None:
    (folder / "model.toml").unlink()
    (folder / "model.py").write_text(
        "from dataclasses import replace\nfrom models.adapt import spec_of\n"
        "async def _echo(data: bytes) -> bytes:\n    return data\n"
        "model = replace(spec_of(_echo, 'x'), queue=1, capacity=2, options={'tgi_compat': 'true', 'rolling_batch': 'vllm'})\n"
    )
    spec = made(folder, "job_queue_size=10\noption.tgi_compat=false\n")
    assert (spec.queue, spec.capacity) == (10, 2)
    assert spec.options == {"tgi_compat": "false", "rolling_batch": "vllm"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        *[(f"x=1\noption.{option}={value}", f"option.{option} {told}") for option, value, told in _BAD],
        ("job_queue_size=many", "job_queue_size must be a whole number from 1 to 2147483647, not 'many'"),
        ("job_queue_size=0", "job_queue_size must be a whole number from 1 to 2147483647, not '0'"),
        ("required_memory_mb=-1", "required_memory_mb must be a whole number from 0 to 2147483647, not '-1'"),
        (
            "option.max_rolling_batch_size=2147483648",
            "option.max_rolling_batch_size must be a whole number from 1 to 2147483647, not '2147483648'",
        ),
        (
            "option.model_loading_timeout=5 min",
            "option.model_loading_timeout must be a whole number from 1 to 2147483647, not '5 min'",
        ),
        ("a=1\nb=\\u12", "line 2: \\u must be followed by four hexadecimal digits, not '\\\\u12'"),
        (b"#" * (64 * KiB + 1), "is larger than 64 KiB"),
    ],
)
def test_each_mistake_is_told_with_the_file_and_the_key(folder: Path, text: str | bytes, told: str) -> None:
    message = refusal(folder, text)
    assert message in (f"m/serving.properties: {told}", f"m/serving.properties {told}")


def test_what_is_no_file_is_not_read(folder: Path) -> None:
    os.mkfifo(folder / "serving.properties")
    with pytest.raises(BadModel, match=r"^m/serving\.properties is not a regular file$"):
        read_folder(str(folder), code=(), defaults=ModelConfig(factory=""), shown="m")


def test_that_of_the_containers_folder_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_folder, "MODEL_FOLDER", folder)
    (folder / "serving.properties").write_text("option.output_formatter=sse\n")
    config = Config(repository=RepositoryConfig(roots=(str(folder),)))
    (worker,) = serve.make_gateway(config).supervisor.workers.values()
    assert worker.spec.options == {"output_formatter": "sse"}
    (folder / "serving.properties").write_text("option.output_formatter=foo\n")
    with pytest.raises(ConfigError, match=r"/serving\.properties: option\.output_formatter must be one of json, .*'foo'$"):
        serve.make_gateway(config)


def test_alone_it_makes_no_model(folder: Path) -> None:
    (folder / "model.toml").unlink()
    assert "holds neither model.toml nor model.py" in refusal(folder, "engine=Python\n")


def test_keys_that_do_nothing_are_named_in_the_log_without_their_values(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "gateway.model_folder")
    read(folder, "option.hf_token=hush\nminWorkers=1\noption.tgi_compat=true\njob_queue_size=1\n\\uD800x\\n=2\n")
    (record,) = caplog.records
    assert vars(record)["keys"] == "option.hf_token, minWorkers, '\\ud800x\\n'"
    assert vars(record)["file"] == "m/serving.properties"
    assert "hush" not in str(vars(record))
    caplog.clear()
    read(folder, "option.tgi_compat=true\n")
    assert not caplog.records


# ---- the environment ----


def lmi(environ: Mapping[str, str], overrides: Mapping[str, str] | None = None, file: Path | None = None) -> LMIConfig:
    return resolve(file=file, environ=environ, overrides=overrides or {}).config.lmi


def test_the_variables_of_lmi_set_its_section() -> None:
    environ = {
        "OPTION_OUTPUT_FORMATTER": "sse", "OPTION_TGI_COMPAT": "TRUE", "OPTION_ROLLING_BATCH": "disable",
        "OPTION_ENABLE_STREAMING": "huggingface",
    }  # fmt: skip
    wanted = LMIConfig(output_formatter="sse", tgi_compat=True, rolling_batch="disable", enable_streaming=True)
    assert lmi(environ) == wanted
    assert lmi({PREFIX + name.removeprefix(PREFIX).lower(): value for name, value in environ.items()}) == wanted


def test_a_variable_holds_where_nothing_of_ours_says_otherwise(tmp_path: Path) -> None:
    environ = {"OPTION_ROLLING_BATCH": "trtllm", "OPTION_TGI_COMPAT": "true"}
    file = tmp_path / "everywire.toml"
    file.write_text("[lmi]\nrolling_batch = 'vllm'\n")
    assert lmi(environ, file=file) == LMIConfig(rolling_batch="vllm", tgi_compat=True)
    assert lmi({**environ, "EVERYWIRE_LMI__ROLLING_BATCH": "lmi-dist"}).rolling_batch == "lmi-dist"
    assert lmi(environ, {"lmi.rolling_batch": "auto"}).rolling_batch == "auto"


def test_a_models_file_wins_over_a_variable(folder: Path) -> None:
    server = lmi({"OPTION_OUTPUT_FORMATTER": "json", "OPTION_TGI_COMPAT": "true"})
    own = text_options(server, made(folder, "option.output_formatter=sse\n").options)
    assert (own.output_formatter, own.tgi_compat) == ("sse", True)


def test_the_printed_configuration_names_the_variable() -> None:
    resolved = resolve(file=None, environ={"OPTION_OUTPUT_FORMATTER": "jsonlines"}, overrides={})
    assert resolved.sources == {"lmi.output_formatter": "OPTION_OUTPUT_FORMATTER"}
    assert 'output_formatter = "jsonlines"  # OPTION_OUTPUT_FORMATTER' in to_toml(resolved).splitlines()


def test_the_batch_of_an_engine_is_no_dynamic_one() -> None:
    assert lmi({"OPTION_ROLLING_BATCH": "disable", "OPTION_ASYNC_MODE": "true"}).rolling_batch == "auto"
    assert lmi({"OPTION_ASYNC_MODE": "true"}) == LMIConfig()


def test_other_variables_of_lmi_and_empty_ones_do_nothing() -> None:
    environ = {
        "OPTION_TGI_COMPAT": "", "OPTION_BEDROCK_COMPAT": "false", "OPTION_DTYPE": "fp16", "OPTION_": "x",
        "OPTION_PREDICT_TIMEOUT": "300", "OPTION_MODEL_LOADING_TIMEOUT": "1500", "PREDICT_TIMEOUT": "60",
        "MODEL_LOADING_TIMEOUT": "60", "HF_MODEL_ID": "some/model", "SERVING_JOB_QUEUE_SIZE": "5", "TGI_COMPAT": "true",
    }  # fmt: skip
    assert resolve(file=None, environ=environ, overrides={}) == resolve(file=None, environ={}, overrides={})


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("OPTION_OUTPUT_FORMATTER", "foo", ": lmi.output_formatter must be one of .*json, jsonlines, .* not 'foo'"),
        ("OPTION_ROLLING_BATCH", "scheduler", ": lmi.rolling_batch must be one of auto, vllm, .* not 'scheduler'"),
        ("OPTION_TGI_COMPAT", "yes", ": lmi.tgi_compat must be true or false, not 'yes'"),
        ("OPTION_BEDROCK_COMPAT", "True", " must be false, not 'True': the schema that it asks for is not served here"),
    ],
)
def test_a_wrong_variable_of_lmi_is_named(variable: str, value: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"^{variable}{told}$"):
        lmi({variable: value})


# ---- the page ----


def test_the_page_has_each_key_that_does_something_with_its_variable() -> None:
    page = (ROOT / "docs" / "howto" / "configure.md").read_text(encoding="utf-8")
    table = page.partition("| key of `serving.properties` |")[2].partition("\n\n")[0]
    rows = [[cell.strip("` ") for cell in line.split("|")[1:3]] for line in table.splitlines()[2:]]
    assert sorted(key for key, _ in rows) == sorted(KNOWN)
    served = {*OPTIONS, *UNSERVED, "async_mode"}
    assert {variable for _, variable in rows if variable} == {PREFIX + option.upper() for option in served}
    for key, variable in rows:
        assert not variable or variable == PREFIX + key.removeprefix("option.").upper()
    ignored = page.partition("| ignored |")[2].partition("\n\n")[0]
    keys = [name for line in ignored.splitlines()[2:] for name in re.findall(r"`([\w.]+)`", line.split("|")[1])]
    assert keys
    assert not KNOWN & set(keys)
    assert read_properties("".join(f"{key}=1\n" for key in keys).encode()).ignored


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("output_formater", "output_formatter"),
        ("tgi_compt", "tgi_compat"),
        ("rollingbatch", "rolling_batch"),
        ("enable_stream", "enable_streaming"),
        ("max_rolling_batchsize", "max_rolling_batch_size"),
    ],
)
def test_an_option_that_is_misspelt_is_refused_with_the_one_that_was_meant(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no option.{key}: did you mean option.{meant}\\?"):
        read_properties(f"option.{key}=json\n".encode())
    model = spec_of(shout, "m", options={key: "json"})
    with pytest.raises(ConfigError, match=f"model 'm': there is no option.{key}: did you mean option.{meant}\\?"):
        Gateway(Config(), [model])


def test_other_options_are_the_models_own() -> None:
    own = ("voice", "max_rolling_batch_prefill_tokens", "input_formatter", "enable_lora", "predict_timeout")
    assert read_properties("".join(f"option.{key}=1\n" for key in own).encode()).options.keys() == set(own)
    Gateway(Config(), [spec_of(shout, "m", options=dict.fromkeys(own, "1"))])


def shout(text: str) -> str:
    return text.upper()
