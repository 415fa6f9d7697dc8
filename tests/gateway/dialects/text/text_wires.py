"""Every wire that carries a text: how it is asked for one, and what it has carried."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway import client
from models.formatters import TextGenerationOutput
from protocols.aws import bidi
from protocols.events import Close, Data, End, Frame, Opcode, Response
from protocols.sse import ServerSentEvent, SSEDecoder
from tests.gateway.dialects.text.test_lmi_forms import ask, parts_of
from tests.gateway.promises import House


@dataclass(frozen=True)
class Told:
    """An answer as its wire has carried it. Members that a wire has no place for are None."""

    text: str
    pieces: Sequence[str] | None = None
    """The texts of its tokens, those that have one."""
    reason: str | None = None
    """`length`, `stop` or `end`, whatever the schema calls it."""
    tokens: int | None = None
    """The number that the answer says."""


@dataclass(frozen=True)
class Asked:
    """One prompt, and what ends its text."""

    prompt: str
    most: int | None = None
    stop: Sequence[str] = ()
    included: bool | None = None
    """True if the text is to have its stop sequence; None: as the schema has it."""
    members: Mapping[str, Any] = field(default_factory=dict)
    """Further members, by the wire's own names, where the wire has its parameters."""


@dataclass(frozen=True)
class Way:
    """One wire, schema and form."""

    ask: Callable[[House, str, str, Asked], Awaitable[Told]]
    path: str
    lmi: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the section `lmi`."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the model's spec."""
    default: int = 30
    """Tokens of an answer where nobody asks for a number."""
    included: bool = True
    """True if a text has its stop sequence by default."""
    kinds: Sequence[str] = ("http1", "http2")
    ending: str = "complete"
    """The ending of an answer that is whole: the client ends a WebSocket."""


class Refused(AssertionError):
    """The answer was an error: its status (0 in a session) and body."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status, body)
        self.status, self.body = status, body


def parameters(asked: Asked) -> dict[str, Any]:
    """Parameters by LMI's names."""
    found: dict[str, Any] = {**asked.members}
    if asked.most is not None:
        found["max_new_tokens"] = asked.most
    if asked.stop:
        found["stop_sequences"] = list(asked.stop)
    if asked.included is not None:
        found["include_stop_str_in_output"] = asked.included
    return found


def _openai(asked: Asked) -> dict[str, Any]:
    found = parameters(asked)
    names = {"max_new_tokens": "max_tokens", "stop_sequences": "stop"}
    return {names.get(name, name): value for name, value in found.items()}


_REASONS = {"length": "length", "eos_token": "end", "stop_sequence": "stop", "stop": "end", None: None}


async def _posted(house: House, path: str, kind: str, document: Any) -> bytes:
    status, headers, body = await ask(house, path, document, kind=kind)
    HEADS.append(headers)
    if status != 200:
        raise Refused(status, body)
    return body


HEADS: list[Mapping[str, str]] = []
"""The heads of the answers so far, sessions left out."""


def events_in(body: bytes) -> list[Any]:
    """The documents of server-sent events, without OpenAI's last."""
    decoder, events = SSEDecoder(), []
    decoder.receive_data(body)
    while isinstance(event := decoder.next_event(), ServerSentEvent):
        events.append(bytes(event.data))
    return [json.loads(event) for event in events if event != b"[DONE]"]


# -- LMI ---------------------------------------------------------------------------------------------------------------


def _of_details(text: str, pieces: list[str] | None, details: Mapping[str, Any]) -> Told:
    return Told(text, pieces, _REASONS[details["finish_reason"]], details["generated_tokens"])


async def _document(house: House, path: str, kind: str, asked: Asked) -> Told:
    body = await _posted(house, path, kind, {"inputs": asked.prompt, "parameters": {**parameters(asked), "details": True}})
    answer = json.loads(body)
    if isinstance(answer, list):  # TGI's form
        (answer,) = answer
    details = answer["details"]
    pieces = [token["text"] for token in details["tokens"] if token["text"]]
    return _of_details(answer["generated_text"], pieces, details)


async def _lines(house: House, path: str, kind: str, asked: Asked) -> Told:
    document = {"inputs": asked.prompt, "parameters": {**parameters(asked), "details": True}, "stream": True}
    body = await _posted(house, path, kind, document)
    if path.endswith("response-stream"):
        body = b"".join(parts_of(body))
    answers = events_in(body) if body.startswith(b"data:") else [json.loads(line) for line in body.splitlines()]
    pieces = [answer["token"]["text"] for answer in answers if answer["token"]["text"]]
    last = answers[-1]
    assert "".join(pieces) == last["generated_text"]
    return _of_details(last["generated_text"], pieces, last["details"])


async def _sse(house: House, path: str, kind: str, asked: Asked) -> Told:
    given = {**parameters(asked), "details": True, "output_formatter": "sse"}
    events = events_in(await _posted(house, path, kind, {"inputs": asked.prompt, "parameters": given}))
    pieces = [event["token"]["text"] for event in events if event["token"]["text"]]
    return _of_details(events[-1]["generated_text"], pieces, events[-1]["details"])


async def _dynamic(house: House, path: str, kind: str, asked: Asked) -> Told:
    body = await _posted(house, path, kind, {"inputs": asked.prompt, "parameters": parameters(asked)})
    return Told(json.loads(body)[0]["generated_text"])


async def _dynamic_lines(house: House, path: str, kind: str, asked: Asked) -> Told:
    body = await _posted(house, path, kind, {"inputs": [asked.prompt], "parameters": parameters(asked)})
    pieces = [json.loads(line)["outputs"][0] for line in body.splitlines()]
    return Told("".join(pieces), [piece for piece in pieces if piece])


def _written(output: TextGenerationOutput) -> str:
    """A formatter: each token on a line of its own, the last with its reason."""
    token, _, last = output.sequences[output.best_sequence_index].get_next_token()
    return (
        json.dumps([token.text, None if token.finish is None else token.finish.value, token.stop] if last else [token.text])
        + "\n"
    )


async def _formatted(house: House, path: str, kind: str, asked: Asked) -> Told:
    body = await _posted(house, path, kind, {"inputs": asked.prompt, "parameters": parameters(asked)})
    *tokens, (text, reason, _) = [json.loads(line) for line in body.splitlines()]
    pieces = [*[piece for (piece,) in tokens], text]
    return Told("".join(pieces), [piece for piece in pieces if piece], _REASONS[reason])


# -- OpenAI ------------------------------------------------------------------------------------------------------------


async def _chat(house: House, path: str, kind: str, asked: Asked) -> Told:
    messages = [{"role": "system", "content": asked.prompt}]
    answer = json.loads(await _posted(house, path, kind, {"messages": messages, **_openai(asked)}))
    (choice,) = answer["choices"]
    return Told(choice["message"]["content"], None, _REASONS[choice["finish_reason"]])


async def _chat_stream(house: House, path: str, kind: str, asked: Asked) -> Told:
    messages = [{"role": "system", "content": asked.prompt}]
    body = await _posted(house, path, kind, {"messages": messages, "stream": True, **_openai(asked)})
    chunks = events_in(body) if body.startswith(b"data:") else [json.loads(line) for line in body.splitlines()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    pieces = [choice["delta"].get("content", "") for choice in choices]
    return Told("".join(pieces), [piece for piece in pieces if piece], _REASONS[choices[-1]["finish_reason"]])


async def _completion(house: House, path: str, kind: str, asked: Asked) -> Told:
    (choice,) = json.loads(await _posted(house, path, kind, {"prompt": asked.prompt, **_openai(asked)}))["choices"]
    return Told(choice["text"], None, _REASONS[choice["finish_reason"]])


async def _completion_stream(house: House, path: str, kind: str, asked: Asked) -> Told:
    chunks = events_in(await _posted(house, path, kind, {"prompt": asked.prompt, "stream": True, **_openai(asked)}))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    pieces = [choice["text"] for choice in choices]
    return Told("".join(pieces), [piece for piece in pieces if piece], _REASONS[choices[-1]["finish_reason"]])


# -- v2 ----------------------------------------------------------------------------------------------------------------


async def _generate(house: House, path: str, kind: str, asked: Asked) -> Told:
    body = await _posted(house, path, kind, {"text_input": asked.prompt, **parameters(asked)})
    return Told(json.loads(body)["text_output"])


async def _generate_stream(house: House, path: str, kind: str, asked: Asked) -> Told:
    body = await _posted(house, path, kind, {"text_input": asked.prompt, "parameters": parameters(asked)})
    pieces = [event["text_output"] for event in events_in(body)]
    return Told("".join(pieces), [piece for piece in pieces if piece])


# -- sessions ----------------------------------------------------------------------------------------------------------


def _as_part(asked: Asked) -> bytes:
    return json.dumps({"inputs": asked.prompt, "parameters": parameters(asked)}).encode()


def _of_parts(parts: list[bytes]) -> Told:
    """An empty part closes the answer."""
    *pieces, last = parts
    assert last == b""
    return Told(b"".join(pieces).decode(), [piece.decode() for piece in pieces])


async def bidi_parts(house: House, path: str, kind: str, asked: Sequence[bytes]) -> list[bytes]:
    """The answer to parts that leave at once, in one bidirectional stream."""
    line = house.line(kind)
    stream = line.next_stream()
    await line.send(*client.post(stream, path, None, [(b"content-type", bidi.CONTENT_TYPE.encode())]))
    for part in asked:
        await line.send(Data(stream=stream, buffers=tuple(bidi.encode_request_part(part, date_ms=0))))
    await line.send(Data(stream=stream, buffers=tuple(bidi.encode_request_end(date_ms=0))), End(stream=stream))
    decoder, parts = bidi.ResponseDecoder(), []
    while not isinstance(event := await line.event(stream), End):
        if isinstance(event, Response):
            assert event.status == 200
            continue
        assert isinstance(event, Data)
        decoder.receive_data(b"".join(event.buffers))
        line.peer.credit(event)
        while isinstance(told := decoder.next_event(), bidi.PayloadPart):
            parts.append(bytes(told.data))
        if isinstance(told, bidi.StreamFailure):
            raise Refused(0, told.message.encode())
    decoder.receive_eof()
    return parts


async def _bidi(house: House, path: str, kind: str, asked: Asked) -> Told:
    return _of_parts(await bidi_parts(house, path, kind, [_as_part(asked)]))


async def _websocket(house: House, path: str, kind: str, asked: Asked) -> Told:
    peer = await house.memory.websocket(path)
    await peer.send(Frame(opcode=Opcode.TEXT, fin=True, data=_as_part(asked)))
    parts: list[bytes] = []
    while b"" not in parts:
        match await peer.next_event():
            case Frame(data=data):
                parts.append(bytes(data))
            case Close(reason=reason):
                peer.close()
                raise Refused(0, reason.encode())
    await peer.send(Close(code=1000))
    while not isinstance(await peer.next_event(), Close):
        pass
    peer.close()
    await house.still()
    return _of_parts(parts)


_SAID: Mapping[str, Any] = {"chat_template": lambda messages: "".join(message.content for message in messages)}
_TGI, _BATCH = {"tgi_compat": True}, {"rolling_batch": "disable"}
_OPENAI: Mapping[str, Any] = {"spec": _SAID, "default": 256, "included": False}

WAYS: Mapping[str, Way] = {
    "generate": Way(_generate, "/v2/models/m/generate"),
    "generate_stream": Way(_generate_stream, "/v2/models/m/generate_stream"),
    "lmi-json": Way(_document, "/predictions/m"),
    "lmi-lines": Way(_lines, "/invocations"),
    "lmi-sse": Way(_sse, "/models/m/invoke"),
    "tgi": Way(_document, "/invocations", _TGI),
    "tgi-stream": Way(_lines, "/predictions/m", _TGI),
    "dynamic": Way(_dynamic, "/predictions/m", _BATCH),
    "dynamic-lines": Way(_dynamic_lines, "/invocations", {**_BATCH, "enable_streaming": True}),
    "formatted": Way(_formatted, "/predictions/m", spec={"output_formatter": _written}),
    "invoke": Way(_document, "/endpoints/m/invocations"),
    "invoke-lines": Way(_lines, "/endpoints/m/invocations"),
    "response-stream": Way(_lines, "/endpoints/m/invocations-response-stream"),
    "chat": Way(_chat, "/v1/chat/completions", **_OPENAI),
    "chat-stream": Way(_chat_stream, "/v1/chat/completions", **_OPENAI),
    "lmi-chat": Way(_chat, "/invocations", {"output_formatter": "json_chat"}, _SAID, included=False),
    "lmi-chat-lines": Way(_chat_stream, "/predictions/m", {"output_formatter": "jsonlines_chat"}, _SAID, included=False),
    "completions": Way(_completion, "/v1/completions", **_OPENAI),
    "completions-stream": Way(_completion_stream, "/v1/completions", **_OPENAI),
    "bidi": Way(_bidi, "/endpoints/m/invocations-bidirectional-stream", kinds=("http2",)),
    "websocket": Way(
        _websocket, "/models/m/invocations-bidirectional-stream", kinds=("websocket",), ending="cancelled-by-client"
    ),
}
SESSIONS = ("bidi", "websocket")
"""They speak to models of parts as they are: nothing says how long an answer of those may be."""
