"""The list of members that clients take for a guarantee, name by name: what is refused, what is nothing, what goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from protocols.text_members import Decided, Form, MemberRefused, decide
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
