"""A stream and a document of the same generation say the same, whatever the model sends and in whatever order."""

import json
from collections.abc import Callable
from itertools import count
from typing import Any, TypeAlias

from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocols.errors import LocalProtocolError
from protocols.openai import ChatEncoder, OpenAIError
from tests.protocols.openai.answers import accumulated, chat, chunks

Step: TypeAlias = tuple[str, tuple[Any, ...], dict[str, Any]]

TEXTS = st.text(st.characters(), max_size=4)  # with quotes, controls and lone surrogates
ENDS = st.sampled_from([None, None, None, "length", "eos_token", "stop_sequence", "tool_calls"])
CHOICES = st.integers(0, 2)
STEPS = st.lists(
    st.one_of(
        st.builds(lambda text, end, n: ("token", (1, text, -0.5), {"finish": end, "sequence": n}), TEXTS, ENDS, CHOICES),
        st.builds(lambda text, end, n: ("thought", (1, text, None), {"finish": end, "sequence": n}), TEXTS, ENDS, CHOICES),
        st.builds(lambda text, n: ("rest", (text,), {"sequence": n}), TEXTS, CHOICES),
        st.builds(lambda end, n: ("finish", (end or "eos_token",), {"sequence": n}), ENDS, CHOICES),
        st.builds(lambda count, n: ("count", (count,), {"sequence": n}), st.integers(0, 9), CHOICES),
        st.builds(
            lambda index, id, name, arguments, end, n, tokens: (
                "call", (index, id, name, arguments), {"finish": end, "sequence": n, "tokens": tokens},
            ),
            st.integers(-1, 3), st.sampled_from(["", "id"]), st.sampled_from(["", "f", '"']), TEXTS, ENDS, CHOICES, st.integers(0, 3),
        ),
    ),
    max_size=20,
)  # fmt: skip


def ids() -> Callable[[], str]:
    """Makes ids in their order, the same for both answers."""
    return map("call_{}".format, count()).__next__


def taken(out: ChatEncoder, steps: list[Step]) -> tuple[bytes, list[str]]:
    """The bytes of these steps, and what each of those that were refused was refused for."""
    body, refused = b"", []
    for name, arguments, more in steps:
        try:
            body += getattr(out, name)(*arguments, **more) or b""
        except (OpenAIError, LocalProtocolError) as e:
            refused.append(str(e))
    return body, refused


@settings(max_examples=300, deadline=None)
@given(STEPS, st.booleans(), st.booleans(), st.booleans())
@example(
    [("call", (1, "", "f", ""), {}), ("call", (0, "", "g", ""), {}), ("call", (1, "", "", "{}"), {})], True, False, False
)
def test_what_a_client_puts_together_is_the_document(steps: list[Step], shown: bool, log_probs: bool, counted: bool) -> None:
    options: dict[str, Any] = {"n": 3, "logprobs": log_probs, "show_thinking": shown}
    usage = {"include_usage": True, "continuous_usage_stats": counted}
    stream, whole = chat(stream=True, stream_options=usage, make_id=ids(), **options), chat(make_id=ids(), **options)
    body, refused = taken(stream, steps)
    nothing, too = taken(whole, steps)
    assert (nothing, too) == (b"", refused)
    found, document = chunks(body + stream.end()), json.loads(whole.document())

    assert found[-1]["usage"] == document["usage"]
    for choice, same in zip(accumulated(found[:-1]), document["choices"], strict=True):
        for place, call in enumerate(choice["message"].get("tool_calls", [])):
            assert call.pop("index") == place  # only a stream tells the place
        if same["message"]["content"] is None:  # a stream cannot know yet, when it says the role
            assert "tool_calls" in same["message"]
            same["message"]["content"] = ""
        if log_probs and choice["logprobs"] is None:
            choice["logprobs"] = {"content": []}
        assert choice == same

    # each choice says its role once, first, and its reason once, last
    for index in range(3):
        own = [chunk["choices"][0] for chunk in found[:-1] if chunk["choices"][0]["index"] == index]
        assert ["role" in choice["delta"] for choice in own] == [True] * bool(own) + [False] * (len(own) - 1)
        assert [choice["finish_reason"] is None for choice in own] == [True] * (len(own) - 1) + [False] * bool(own)
