"""The list of members that clients take for a guarantee, name by name: what is refused, what is nothing, what goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from protocols.text_members import Decided, Form, Format, MemberRefused, decide
from tests.protocols.text_guarantees import GUARANTEES, HINTS, LISTED, NOTHING, SCHEMA, TO_THE_MODEL, TOOLS

FORMS: Sequence[Form] = ("chat", "completions", "own")
OPENAI: Sequence[Form] = ("chat", "completions")
OF_ONE_FORM: Mapping[str, tuple[Sequence[Form], Any]] = {
    "suffix": (("completions",), "the end"),
    "echo": (("chat",), True),
    "prompt_logprobs": (OPENAI, 0),
}
"""Names that mean something else on other wires."""


def refusal(members: Mapping[str, Any], form: Form = "chat", *listed: str, **places: Any) -> MemberRefused:
    with pytest.raises(MemberRefused) as caught:
        decide(members, listed, "lm", form, **places)
    assert caught.value.message.startswith(f"{caught.value.path}: ")
    return caught.value


@pytest.mark.parametrize("name", GUARANTEES)
@pytest.mark.parametrize("form", FORMS)
def test_what_the_answer_would_not_have_is_refused_by_name(name: str, form: Form) -> None:
    for value in GUARANTEES[name]:
        assert refusal({"nobody_knows": 1, name: value}, form).path == name
        assert refusal({name: value}, form, prefix="parameters.").path == f"parameters.{name}"
        assert refusal({"nobody_knows": 1}, form, beside={name: value}, prefix="parameters.").path == name


@pytest.mark.parametrize("name", OF_ONE_FORM)
def test_a_name_that_means_something_else_elsewhere_is_refused_where_it_means_this(name: str) -> None:
    forms, value = OF_ONE_FORM[name]
    for form in FORMS:
        if form in forms:
            assert refusal({name: value}, form).path == name
        else:
            assert decide({name: value}, (), "lm", form).extra == {name: value}


@pytest.mark.parametrize("form", FORMS)
def test_a_value_that_asks_for_nothing_is_as_if_absent(form: Form) -> None:
    for name in GUARANTEES:
        assert decide({name: None}, (), "lm", form).extra == {}
    for name, value in NOTHING.items():
        assert decide({name: value}, (), "lm", form) == Decided(extra={}, unknown=())


@pytest.mark.parametrize("name", LISTED)
def test_a_model_that_lists_it_in_its_parameters_gets_it(name: str) -> None:
    value = GUARANTEES.get(name, (True,))[0]
    assert decide({name: value}, (name,), "lm", "chat") == Decided(extra={name: value}, unknown=())
    assert refusal({name: value}, "chat", "temperature").message == f"{name}: model 'lm' does not list it in its parameters"


@pytest.mark.parametrize("name", HINTS)
def test_a_hint_is_passed_over_and_its_type_is_checked(name: str) -> None:
    value, wrong = HINTS[name]
    for form in OPENAI:
        assert decide({name: value, "more": 1}, (), "lm", form) == Decided(extra={"more": 1}, unknown=("more",))
        assert refusal({name: wrong}, form).message.startswith(f"{name}: expected ")
    for any_value in (value, wrong):  # these parameters are the model's own
        assert decide({name: any_value}, (), "lm", "own") == Decided(extra={name: any_value}, unknown=())


@pytest.mark.parametrize("form", FORMS)
def test_what_nobody_knows_goes_on_to_the_model_and_is_named(form: Form) -> None:
    members = {name: [1] for name in TO_THE_MODEL}
    assert decide(members, (), "lm", form) == Decided(extra=members, unknown=TO_THE_MODEL)


def test_of_two_constraints_the_later_is_named_and_of_other_refusals_the_first() -> None:
    assert refusal({"guided_json": SCHEMA, "guided_regex": "a"}).path == "guided_regex"
    assert refusal({"guided_regex": "a", "guided_json": SCHEMA}).path == "guided_json"
    assert refusal({"structured_outputs": {"json": SCHEMA, "regex": "a"}}).path == "structured_outputs.regex"
    assert refusal({"watermark": True, "return_token_ids": True}).path == "watermark"
    assert refusal({"watermark": True, "guided_regex": "a"}).path == "watermark"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"guided_regex": "a"}, "guided_regex: model 'lm' does not declare regex"),
        ({"guided_grammar": "a"}, "guided_grammar: model 'lm' does not declare grammar (in Lark's form)"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools: model 'lm' does not declare tools"),
        ({"tools": {}}, "tools: expected an array, got an object"),
        ({"tool_choice": "auto"}, "tool_choice: expected none where there are no tools: model 'lm' does not declare tools"),
        ({"response_format": {"type": "xml"}}, "response_format.type: expected text alone, or one of json, json_schema, "
         "json_object, regex, choice, grammar, structural_tag, got the string 'xml'"),
        ({"response_format": {}}, "response_format.type: expected text alone, or one of json, json_schema, json_object, regex, "
         "choice, grammar, structural_tag, got nothing"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format: model 'lm' does not declare json_object"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format: model 'lm' does not declare json_schema"),
        ({"structured_outputs": {"unheard_of": 1}}, "structured_outputs.unheard_of: not offered"),
        ({"structured_outputs": "a+"}, "structured_outputs: expected an object, got the string 'a+'"),
        ({"grammar": {"type": "xml"}}, "grammar.type: expected a text, or an object of type json or regex, got the string 'xml'"),
        ({"text": "x"}, "text: expected an object, got the string 'x'"),
        ({"watermark": 1}, "watermark: expected true or false, got 1"),
    ],
)  # fmt: skip
def test_what_a_refusal_says(members: Mapping[str, Any], message: str) -> None:
    assert refusal(members).message == message


def test_tools_that_may_not_be_called_are_as_if_absent() -> None:
    for tools, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        asked: Mapping[str, Any] = {choice: "none", tools: [{"name": "f"}]}
        assert decide(asked, (), "lm", "chat").extra == {}


# -- declared features

PATTERN, GRAMMAR, SOME = "a+", "root ::= 'a'", ("a", "b")
BY_SCHEMA = Format(kind="json_schema", schema=SCHEMA)
FORMATS: Sequence[tuple[Mapping[str, Any], Format]] = (
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
     Format(kind="json_schema", schema=SCHEMA, name="s", strict=True)),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": None, "description": "d"}}}, BY_SCHEMA),
    ({"response_format": {"type": "json", "value": SCHEMA}}, BY_SCHEMA),
    ({"response_format": {"type": "json_object"}}, Format(kind="json_object")),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, BY_SCHEMA),
    ({"response_format": {"type": "regex", "value": PATTERN}}, Format(kind="regex", pattern=PATTERN)),
    ({"response_format": {"type": "regex", "pattern": PATTERN}}, Format(kind="regex", pattern=PATTERN)),
    ({"response_format": {"type": "choice", "choices": ["a", "b"]}}, Format(kind="choice", choices=SOME)),
    ({"response_format": {"type": "grammar", "grammar": GRAMMAR}}, Format(kind="grammar", pattern=GRAMMAR)),
    ({"response_format": {"type": "structural_tag", "structures": []}}, Format(kind="grammar", pattern='{"structures":[]}')),
    ({"guided_json": SCHEMA}, BY_SCHEMA),
    ({"guided_json": '{"type": "object"}'}, BY_SCHEMA),
    ({"json_schema": SCHEMA}, BY_SCHEMA),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, BY_SCHEMA),
    ({"structured_outputs": {"json_object": True}}, Format(kind="json_object")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Format(kind="choice", choices=SOME)),
    ({"structured_outputs": {"regex": PATTERN}}, Format(kind="regex", pattern=PATTERN)),
    ({"structured_outputs": {"grammar": GRAMMAR}}, Format(kind="grammar", pattern=GRAMMAR)),
    ({"guided_json_object": True}, Format(kind="json_object")),
    ({"guided_choice": ["a", "b"]}, Format(kind="choice", choices=SOME)),
    ({"guided_regex": PATTERN}, Format(kind="regex", pattern=PATTERN)),
    ({"regex": PATTERN}, Format(kind="regex", pattern=PATTERN)),
    ({"guided_grammar": GRAMMAR}, Format(kind="grammar", pattern=GRAMMAR)),
    ({"ebnf": GRAMMAR}, Format(kind="grammar", pattern=GRAMMAR)),
    ({"grammar": GRAMMAR}, Format(kind="grammar", pattern=GRAMMAR)),
    ({"grammar": {"type": "json", "value": SCHEMA}}, BY_SCHEMA),
    ({"grammar": {"type": "json", "value": '{"type": "object"}'}}, BY_SCHEMA),
    ({"grammar": {"type": "regex", "value": PATTERN}}, Format(kind="regex", pattern=PATTERN)),
)  # fmt: skip
"""Each form of a format, and what a model gets of it."""


def decided(members: Mapping[str, Any], *features: str, form: Form = "chat", **places: Any) -> Decided:
    return decide(members, (), "lm", form, features=features, **places)


@pytest.mark.parametrize(("members", "found"), FORMATS)
@pytest.mark.parametrize("form", FORMS)
def test_a_format_goes_to_a_model_that_declares_its_kind_and_to_no_other(
    members: Mapping[str, Any], found: Format, form: Form
) -> None:
    assert decided(members, found.kind, form=form) == Decided(format=found)
    others = {"json_schema", "json_object", "regex", "choice", "grammar", "tools"} - {found.kind}
    with pytest.raises(MemberRefused, match=f"does not declare {found.kind}"):
        decided(members, *others, form=form)


@pytest.mark.parametrize("name", ["text", "output_config"])
def test_so_does_a_format_in_the_place_that_other_routes_have(name: str) -> None:
    flat = {"type": "json_schema", "name": "s", "schema": SCHEMA}
    found = Decided(format=Format(kind="json_schema", schema=SCHEMA, name="s"))
    assert decided({name: {"format": flat, "verbosity": "low"}}, "json_schema") == found


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.schema: expected a schema, got nothing"),
        ({"response_format": {"type": "json_schema", "json_schema": 7}}, "response_format.json_schema: expected an object, got 7"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
         "response_format.json_schema.schema: expected a schema, got an array of 1"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "name": 1}}},
         "response_format.json_schema.name: expected a string, got 1"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": "yes"}}},
         "response_format.json_schema.strict: expected true or false, got the string 'yes'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"not": {}}}}}}},
         "response_format.json_schema.schema.properties.a.not: not offered, no answer can be held to it"),
        ({"guided_json": "{"}, "guided_json: expected a schema, or its JSON as a text, got the string '{'"),
        ({"guided_json": {"items": {"$ref": "http://x"}}},
         "guided_json.items.$ref: expected a reference within the schema, which begins with #"),
        ({"guided_json": {"x": "y" * 262_144}}, "guided_json: expected a schema of at most 262144 characters, got an object"),
        ({"guided_choice": "a"}, "guided_choice: expected an array of 1 to 1024 texts, got the string 'a'"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]: expected a text that is not empty, got an empty string"),
        ({"guided_regex": ["a"]}, "guided_regex: expected a text of 1 to 262144 characters, got an array of 1"),
        ({"response_format": {"type": "regex"}}, "response_format.value: expected a text of 1 to 262144 characters, got nothing"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex: expected one format, got guided_json too"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}},
         "structured_outputs.regex: expected one format, got structured_outputs.json too"),
        ({"adapters": ["a", "b"]}, "adapters: expected the name of one adapter, got an array of 2"),
        ({"adapters": {"a": 1}}, "adapters: expected the name of one adapter, got an object"),
        ({"adapter_id": "a", "lora_path": "b"}, "lora_path: expected what another member says of the adapter, or one of the two alone"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs: expected an object, got the string 'x'"),
    ],
)  # fmt: skip
def test_what_is_declared_is_still_checked(members: Mapping[str, Any], message: str) -> None:
    features = ("json_schema", "json_object", "regex", "choice", "grammar", "adapters", "template")
    with pytest.raises(MemberRefused) as caught:
        decided(members, *features)
    assert caught.value.message == message
    assert message.startswith(f"{caught.value.path}: ")


def test_a_model_that_judges_formats_itself_gets_any_schema() -> None:
    schema = {"not": {"type": "null"}}
    assert decided({"guided_json": schema}, "json_schema", judges=True).format == Format(kind="json_schema", schema=schema)


@pytest.mark.parametrize(
    ("members", "feature", "found"),
    [
        ({"adapters": ["fr"]}, "adapters", Decided(adapter="fr")),
        ({"adapter_id": "fr", "lora_id": "fr"}, "adapters", Decided(adapter="fr")),
        ({"chat_template_kwargs": {"x": 1}}, "template", Decided(template={"x": 1})),
        ({"continue_final_message": True, "add_generation_prompt": False}, "prefill", Decided(prefill=True)),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tools", Decided()),
    ],
)
def test_a_feature_gets_what_is_asked(members: Mapping[str, Any], feature: str, found: Decided) -> None:
    assert decided(members, feature) == found
    with pytest.raises(MemberRefused, match=f"does not declare {feature}"):
        decided(members)


def test_a_tool_that_must_be_called_needs_a_feature_of_its_own() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        asked = {"tools": TOOLS, "tool_choice": choice}
        assert decided(asked, "tools", "tool_choice") == Decided()
        with pytest.raises(MemberRefused, match="tool_choice: model 'lm' does not declare tool_choice"):
            decided(asked, "tools")


@pytest.mark.parametrize("form", ["completions", "own"])
def test_tools_and_beginnings_belong_to_chats(form: Form) -> None:
    for members in ({"tools": TOOLS}, {"continue_final_message": True}):
        with pytest.raises(MemberRefused, match="expected messages, which make a chat of the request"):
            decided(members, "tools", "prefill", form=form)
