"""Conversations as prompts: the template of models that have none of their own."""

from models.chat import ChatMessage, plain_template


def test_a_conversation_is_a_line_for_each_speaker_and_the_beginning_of_the_next() -> None:
    messages = [
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content="Hi"),
        ChatMessage(role="assistant", content="Hello."),
        ChatMessage(role="user", content="Who are you?"),
    ]
    assert plain_template(messages) == "Be brief.\nUser: Hi\nAssistant: Hello.\nUser: Who are you?\nAssistant:"


def test_who_has_a_name_speaks_under_it() -> None:
    messages = [ChatMessage(role="user", content="Hi", name="Ada"), ChatMessage(role="tool", content="42")]
    assert plain_template(messages) == "Ada: Hi\nTool: 42\nAssistant:"


def test_what_developers_say_has_no_speaker_as_systems_have_none() -> None:
    assert plain_template([ChatMessage(role="developer", content="Be kind.", name="dev")]) == "Be kind.\nAssistant:"


def test_no_messages_are_the_assistants_beginning_alone() -> None:
    assert plain_template([]) == "Assistant:"
