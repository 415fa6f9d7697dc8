"""Encoders of answers for tests, and what a client makes of their bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from protocols.events import Signal
from protocols.openai import ChatEncoder, ChatForm, CompletionEncoder, parse_chat, parse_completion
from protocols.sse import SSEDecoder


def chat(
    form: ChatForm = ChatForm.OPENAI,
    *,
    prompt_tokens: int | None = 9,
    max_text: int = 1 << 20,
    make_id: Callable[[], str] | None = None,
    show_thinking: bool = True,
    **members: Any,
) -> ChatEncoder:
    request = parse_chat({"messages": [{"role": "user", "content": "Hello!"}], **members})
    return ChatEncoder(
        request,
        id="chatcmpl-123",
        created=1694268190,
        model="lm",
        form=form,
        prompt_tokens=prompt_tokens,
        max_text=max_text,
        make_id=make_id,
        show_thinking=show_thinking,
    )


def completion(*, prompt_tokens: int | None = 5, max_text: int = 1 << 20, **members: Any) -> CompletionEncoder:
    request = parse_completion({"prompt": "This is", **members})
    return CompletionEncoder(
        request, id="cmpl-7", created=1690759702, model="lm", prompt_tokens=prompt_tokens, max_text=max_text
    )


def generate(out: ChatEncoder | CompletionEncoder) -> bytes:
    """Two tokens of text and the end of the sequence."""
    body = out.token(1, "Hel", -0.5) + out.token(2, "lo", -0.25) + out.token(0, "", -0.125, True, "eos_token")
    return body + (out.end() if out.streaming else out.document())


def events(body: bytes) -> list[str]:
    """The data of each event, as a client's decoder finds them."""
    decoder = SSEDecoder()
    decoder.receive_data(body)
    found = []
    while not isinstance(event := decoder.next_event(), Signal):
        found.append(event.data.decode())
    return found


def chunks(body: bytes) -> list[Any]:
    *data, done = events(body)
    assert done == "[DONE]"
    return [json.loads(text) for text in data]


def accumulated(found: list[Any]) -> list[Any]:
    """The choices that a client puts together from chunks, in the order of their index, each as those of a document."""
    choices: dict[int, Any] = {}
    for chunk in found:
        for choice in chunk["choices"]:
            whole = choices.setdefault(choice["index"], {"index": choice["index"], "message": {}, "logprobs": None})
            whole["message"] = added(whole["message"], choice["delta"])
            whole["finish_reason"] = choice["finish_reason"]
            if choice["logprobs"] is not None:
                whole["logprobs"] = added(whole["logprobs"] or {"content": []}, choice["logprobs"])
    return [choices[index] for index in sorted(choices)]


def added(whole: Any, delta: Any) -> Any:
    """A delta added to what came before as openai-python adds it (lib/streaming/_deltas.py): texts are joined, objects are
    merged, and of a list of objects with an `index` that is the place in the list. A `type` is replaced."""
    if whole is None:
        return delta
    if isinstance(whole, str):
        return whole + delta
    if isinstance(whole, dict):
        keys = {
            key: delta[key] if key in ("index", "type") or key not in whole else added(whole[key], delta[key])
            for key in delta
        }
        return {**whole, **keys}
    assert isinstance(whole, list)
    for entry in delta:
        if "index" not in entry:  # log-probabilities, which a client only appends
            whole = [*whole, entry]
        elif entry["index"] < len(whole):
            whole = [added(one, entry) if place == entry["index"] else one for place, one in enumerate(whole)]
        else:
            whole = [*whole, entry]  # list.insert beyond the end, wherever that is
    return whole
