"""The sweep's stories of text: every schema and form, several prompts and sequences, and each kind of function that stands for
a model."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final

import numpy as np
import trio

from gateway.client import Peer, questions
from gateway.client.answers import (
    Answer,
    CompletionEventsAnswer,
    GenerateEventsAnswer,
    GenerateReplyAnswer,
    StreamCallAnswer,
)
from gateway.client.questions import Question
from gateway.config import Config, LMIConfig
from gateway.testing.stories.talk import Talk
from models.adapt import blocking, spec_of
from models.blocking import cancel_token
from models.chat import ChatMessage
from models.formatters import Input, TextGenerationOutput, TextInput
from models.messages import Family, Finish, FinishReason, Part, Prompt, Token, TopToken
from models.spec import ModelSpec
from protocols.events import Buffer, Headers
from protocols.grpc.v2_client import read_streamed_response
from protocols.lmi.response import parse_stream_line
from protocols.sse import ServerSentEvent, SSEDecoder
from tests.gateway.sagemaker_answers import WithinEvents
from tests.gateway.sweep_sagemaker import _HTTP
from tests.gateway.sweep_scenarios import (
    _SMALL,
    _STREAM,
    FRESH,
    NEIGHBOUR,
    VICTIM,
    Ask,
    HTTP2Line,
    Scenario,
    Stage,
    Sweeping,
    ask,
    bidi_talk,
    in_pieces,
    over_http1,
    over_http2,
    over_websocket,
    played,
    together,
)

_JSON: Headers = [(b"content-type", b"application/json")]
_PLAIN: Headers = [(b"content-type", b"text/plain")]
_WORD = re.compile(r"\[[^\]]*\]")
_MOST = 5
"""Words of an answer where nobody asks for fewer."""


# -- models: each word has its sequence and its number, so that none can be lost, or come twice, in silence --------------

Kind = Callable[[Stage], Callable[..., Any]]


def _word(strand: str, number: int, size: int = 40) -> str:
    return f"[{strand}.{number}".ljust(size, "_") + "]"


def _words(text: str) -> list[bytes]:
    """Those of a text, which has nothing else."""
    found = _WORD.findall(text)
    assert "".join(found) == text, f"half a word in {text[:200]!r}"
    return [word.encode() for word in found]


def _whose(prompt: str) -> str:
    """The talk that asks it."""
    return prompt.partition(".")[2].partition(" ")[0]


@contextmanager
def _asked(stage: Stage, prompt: Prompt) -> Iterator[tuple[Talk, list[str]]]:
    """A call for one prompt: whose it is, by the prompt itself, as functions see nothing else; and the words to say."""
    strand = prompt.text.partition(".")[0]
    with stage.call(f"talk={_whose(prompt.text)}") as talk:
        stage.point(talk)
        talk.take(prompt.text.encode())
        yield talk, [_word(f"{strand}/0", number) for number in range(min(prompt.parameters.max_new_tokens, _most(strand)))]
        _over(talk)


def _most(strand: str) -> int:
    """Prompts beside one another have answers of several lengths."""
    return _MOST - int(strand) if strand.isdigit() else 1000


def _over(talk: Talk) -> None:
    """An answer among others of a session is ended by a part that is empty."""
    if talk.kept is _bare:
        talk.say(b"")


def async_generator(stage: Stage) -> Callable[..., Any]:
    """Says what it offers: it cannot know which of it was sent."""

    async def model(prompt: Prompt) -> AsyncIterator[str]:
        with _asked(stage, prompt) as (talk, words):
            for number, word in enumerate(words):
                if number % 3 == 1:
                    await trio.sleep(0.0007)
                stage.point(talk)
                talk.say(word.encode())
                yield word
            await trio.sleep(0.3 if words and words[0].startswith("[2/") else 0.0011)  # a third prompt is hard

    return model


def counted(stage: Stage) -> Callable[..., Any]:
    """The words of `async_generator` as bytes. It counts a prompt's tokens if asked to, in a thread."""
    words = async_generator(stage)

    async def model(prompt: Prompt) -> AsyncIterator[Token]:
        async with aclosing(words(prompt)) as said:
            async for word in said:
                yield Token(text="", data=word.encode())

    def count_tokens(text: str) -> int:
        stage.point(stage.talks[_whose(text)])
        return len(text.split())

    model.count_tokens = count_tokens  # type: ignore[attr-defined]
    return model


def generator(stage: Stage) -> Callable[..., Any]:
    """Says its words one by one, in a thread."""

    def model(prompt: Prompt) -> Iterator[str]:
        with _asked(stage, prompt) as (talk, words):
            for word in words:
                stage.point(talk)
                cancel_token().check()
                talk.say(word.encode())
                yield word

    return model


def quick_generator(stage: Stage) -> Callable[..., Any]:
    """Says its words one by one, as a plain generator on the event loop."""
    model: Callable[..., Any] = blocking(False)(generator(stage))
    return model


def coroutine(stage: Stage) -> Callable[..., Any]:
    """Says all its words at once."""

    async def model(prompt: Prompt) -> str:
        with _asked(stage, prompt) as (talk, words):
            await trio.sleep(0.0007)
            stage.point(talk)
            await trio.sleep(0.0007)
            for word in words:
                talk.say(word.encode())
            return "".join(words)

    return model


def function(stage: Stage) -> Callable[..., Any]:
    """Says all its words at once, in a thread."""

    def model(prompt: Prompt) -> str:
        with _asked(stage, prompt) as (talk, words):
            stage.point(talk)
            cancel_token().check()
            for word in words:
                talk.say(word.encode())
            return "".join(words)

    return model


@played
async def session(me: Sweeping[Prompt, Token | Finish]) -> None:
    """As many sequences as are asked for, in turn. Others than the first are a word shorter, which they say."""
    talk = me.talk
    if talk.begun > talk.calls - (talk.kept is _bare):
        return  # a prompt that is not taken ends the session
    prompt = await me.receive()
    me.session.prompt_tokens = 3
    strand, asked = prompt.text.partition(".")[0], prompt.parameters
    most = min(asked.max_new_tokens, _most(strand))
    for number in range(most):
        if number % 3 == 1:
            await trio.sleep(0.0007)
        for sequence in range(asked.n):
            if sequence and number + 1 == most:
                await me.session.send(Finish(reason=FinishReason.EOS_TOKEN, sequence=sequence))
                continue
            top = (TopToken(text=" top"),) * asked.top_n_tokens
            word = Token(text=_word(f"{strand}/{sequence}", number), id=number, top=top, sequence=sequence)
            try:
                await me.send(word)
            except trio.ClosedResourceError:
                talk.say(b"what nobody wanted")  # though nobody has more words than were asked for
                raise
    await trio.sleep(0.0011)
    _over(talk)


def parts(stage: Stage) -> Callable[..., Any]:
    """Says its words one by one, as parts whose bytes are the text."""

    async def model(part: Part) -> AsyncIterator[bytes]:
        with _asked(stage, Prompt(text=bytes(part.data).decode())) as (talk, words):
            for word in words:
                stage.point(talk)
                talk.say(word.encode())
                yield word.encode()

    return model


def endless(stage: Stage) -> Callable[..., Any]:
    """As many words as are asked for, without a pause: only its client stops it."""

    async def model(prompt: Prompt) -> AsyncIterator[str]:
        with stage.call(f"talk={_whose(prompt.text)}") as talk:
            talk.take(prompt.text.encode())
            for number in range(prompt.parameters.max_new_tokens):
                stage.point(talk)
                word = _word("0/0", number, 400)
                talk.say(word.encode())
                yield word

    return model


def careless(stage: Stage) -> Callable[..., Any]:
    """Says words for ever, whatever was asked for, of which two come before a stop sequence. The wanted ones are said."""

    async def model(prompt: Prompt) -> AsyncIterator[str]:
        strand = prompt.text.partition(".")[0]
        wanted = 2 if prompt.parameters.stop_sequences else prompt.parameters.max_new_tokens
        with stage.call(f"talk={_whose(prompt.text)}") as talk:
            talk.take(prompt.text.encode())
            for number in itertools.count():
                if number % 3 == 1:
                    await trio.sleep(0.0007)
                stage.point(talk)
                word = _word(f"{strand}/0", number)
                if number < wanted:
                    talk.say(word.encode())
                    if number + 1 == wanted:
                        _over(talk)
                yield word

    return model


_STOPS = [f"[{strand}/0.2" for strand in range(3)]
"""The begin of each prompt's third word."""


# -- readers of answers --------------------------------------------------------------------------------------------------


class _Words(Answer):
    """An answer of words."""

    def told(self, text: str) -> None:
        assert not self.error, "a word after the failure"
        self.messages.append(text)

    def failed(self) -> None:
        assert not self.error, "a second failure"
        self.error = "failed"


class _Lines(_Words):
    """Lines, each of which is an object."""

    def _read(self, data: Buffer) -> None:
        super()._read(data)
        while (at := self.body.find(b"\n")) >= 0:
            line = bytes(self.body[:at])
            del self.body[: at + 1]
            self.line(line)

    def line(self, line: bytes) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        assert not self.body, "the stream ended in the middle of a line"


@final
class Chunks(CompletionEventsAnswer):
    """Chunks of OpenAI's, of a chat or of completions, with the reason of each choice's last."""

    def __init__(self) -> None:
        super().__init__()
        self._reasons: dict[int, str | None] = {}

    def _chunk(self, chunk: dict[str, Any]) -> None:
        for choice in chunk.get("choices", ()):
            assert self._reasons.get(choice["index"]) is None, "a chunk after the choice's last"
            self._reasons[choice["index"]] = choice["finish_reason"]
            if "text" in choice:
                choice["delta"] = {"content": choice["text"]}
        super()._chunk(chunk)

    def _finish(self) -> None:
        super()._finish()
        assert self.error or (self._reasons and all(self._reasons.values())), f"no reason in {self._reasons}"


@final
class ChatLines(_Lines):
    """LMI's chunks of a chat, each on a line."""

    _reason: str | None = None

    def line(self, line: bytes) -> None:
        document = json.loads(line)
        if "error" in document:
            self.failed()
            return
        (choice,) = document["choices"]
        assert self._reason is None, "a chunk after the last"
        self.told(choice["delta"].get("content", ""))
        self._reason = choice["finish_reason"]

    def _finish(self) -> None:
        super()._finish()
        assert self.error or self._reason, "the stream ended without a reason"


@final
class Document(_Words):
    """A document of OpenAI's, LMI's or TGI's, with every sequence."""

    def _finish(self) -> None:
        document = json.loads(self.body)
        if isinstance(document, dict) and "choices" in document:
            for choice in document["choices"]:
                assert choice["finish_reason"], "no reason"
                self.told(choice["message"]["content"] if "message" in choice else choice["text"])
            return
        for answer in document if isinstance(document, list) else [document]:
            self._answer(answer)

    def _answer(self, answer: dict[str, Any]) -> None:
        details = answer.get("details", {})
        self.told(answer["generated_text"])
        for one in (details | answer, *details.get("best_of_sequences", [])) if details else ():
            assert one["finish_reason"] in ("length", "eos_token"), one
            assert "".join(token["text"] for token in one["tokens"]) == one["generated_text"]
            assert len(one["tokens"]) == one["generated_tokens"]
        for other in details.get("best_of_sequences", []):
            self.told(other["generated_text"])


@final
class LMIEvents(_Words):
    """LMI's server-sent events, and TGI's."""

    _text: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self._decoder = SSEDecoder()

    def _read(self, data: Buffer) -> None:
        self._decoder.receive_data(data)
        while isinstance(event := self._decoder.next_event(), ServerSentEvent):
            self._event(parse_stream_line(event.data))

    def _event(self, told: dict[str, Any]) -> None:
        assert self._text is None, "an event after the last"
        if "error" in told or (told.get("details") or {}).get("finish_reason") == "error":
            self.failed()
            return
        assert not self.error
        token = told["token"]
        if not (token.get("special_token") or token.get("special")):
            self.told(token["text"])
        self._text = told.get("generated_text")

    def _finish(self) -> None:
        assert self.error or self._text is not None, "the stream ended without its last event"
        assert self.error or self._text == self.text, "the whole is not the sum of its words"


@final
class GRPCTexts(StreamCallAnswer):
    """ModelStreamInfer's responses to one request of a model of text. That it failed is no error of the stream."""

    failed = False

    def _message(self, data: Buffer) -> None:
        found = read_streamed_response(data)
        assert not self.failed, "a response after the failure"
        if found.error:
            self.failed = True
        else:
            self.messages.append(found.answer["text_output"].elements[0].decode())


@final
class BatchLines(_Lines):
    """Lines of a dynamic batch."""

    def __init__(self, prompts: int = 3) -> None:
        super().__init__()
        self._prompts = prompts

    def line(self, line: bytes) -> None:
        told = json.loads(line)
        if "error" in told:
            self.failed()
            return
        assert len(told["outputs"]) == self._prompts
        for place, text in enumerate(told["outputs"]):
            assert text == "" or text.startswith(f"[{place}/0."), f"a word of another prompt at {place}: {text}"
            self.told(text)


@final
class WrittenLines(_Lines):
    """Reads the lines that `_write` makes of words."""

    _last = False

    def line(self, line: bytes) -> None:
        if line.startswith(b"{"):
            assert "error" in json.loads(line)
            self.failed()
            return
        assert not self.error
        if line:  # an error has a line end before it
            assert not self._last, "a line after the last"
            assert line.startswith(b"<") == (not self.messages), "the first line is marked, and no other"
            self._last = line.endswith(b">")
            self.told(line.decode().strip("<>"))

    def _finish(self) -> None:
        super()._finish()
        assert self.error or self._last, "the answer ended without its last line"


# -- functions of a model's author -----------------------------------------------------------------------------------------


def _chat(stage: Stage, messages: Sequence[ChatMessage]) -> str:
    """The prompt is the last message's."""
    prompt = messages[-1].content
    stage.point(stage.talks[_whose(prompt)])
    return prompt


def _read(stage: Stage, tokens: int, item: Input, **more: Any) -> TextInput:
    """The body is the prompt."""
    prompt = item.as_text()
    stage.point(stage.talks[_whose(prompt)])
    return TextInput(prompt, {"max_new_tokens": tokens})


def _write(stage: Stage, output: TextGenerationOutput) -> str:
    """Each word on a line, the first after "<" and the last before ">"."""
    stage.point(stage.talks[_whose(output.input.input_text)])
    token, first, last = output.sequences[output.best_sequence_index].get_next_token()
    return f"{'<' if first else ''}{token.text}{'>' if last else ''}\n"


ACTED_ON = frozenset(
    ("max_new_tokens", "n", "best_of", "num_beams", "decoder_input_details", "prompt_logprobs", "top_n_tokens")
)
"""The parameters of these models: they make several sequences of a prompt themselves."""


def _serving(kind: Kind, formatted: int) -> Callable[[Stage], Callable[[str], ModelSpec]]:
    def served(stage: Stage) -> Callable[[str], ModelSpec]:
        fields: dict[str, Any] = {"chat_template": partial(_chat, stage), "parameters": ACTED_ON}
        if kind is session:
            fields["family"] = Family.TEXT
        if formatted:
            fields |= {"input_formatter": partial(_read, stage, formatted), "output_formatter": partial(_write, stage)}
        return lambda name: spec_of(kind(stage), name, **fields)

    return served


# -- clients -----------------------------------------------------------------------------------------------------------------


def _bare(data: Buffer, last: bool) -> bytes:
    """A part as it is; of a request the prompt, which is what its model sees of it."""
    said = bytes(data)
    return json.loads(said)["inputs"].encode() if said.startswith(b"{") else said


def _form(
    path: str,
    write: Callable[[Talk, list[str]], Any],
    answer: Callable[[], Answer],
    *,
    prompts: int = 1,
    strands: bool = False,
    words: int = 20,
) -> Ask:
    """How a request is written, its JSON or its text, and its answer read; `words` are those of each prompt."""

    async def asking(where: Peer | HTTP2Line, talk: Talk, **how: Any) -> None:
        talk.calls, talk.strands, talk.split = prompts, strands, _words
        texts = [f"{place}.{talk.name} " + "word " * words for place in range(prompts)]
        written = write(talk, texts)
        headers = _PLAIN if isinstance(written, str) else _JSON
        body = written.encode() if isinstance(written, str) else json.dumps(written).encode()
        question = Question(path=path.format(talk.model), headers=headers, body=body, answer=answer)
        await ask(where, talk, question, in_pieces(talk, body, 2, *(text.encode() for text in texts)), **how)

    return asking


def _lmi(path: str, answer: Callable[[], Answer], *, several: bool = False, **parameters: Any) -> Ask:
    """LMI's schema."""
    stream = parameters.pop("stream", False)
    given = {"max_new_tokens": 4, **parameters}

    def write(talk: Talk, prompts: list[str]) -> Any:
        return {"inputs": prompts[0], "parameters": given, "stream": stream}

    return _form(path, write, answer, strands=several)


def _batch(path: str, answer: Callable[[], Answer], **asked: Any) -> Ask:
    """LMI's schema with three prompts, the later ones with shorter answers."""

    def write(talk: Talk, prompts: list[str]) -> Any:
        return {"inputs": prompts, "parameters": {"max_new_tokens": 4, **asked}}

    return _form(path, write, answer, prompts=3, strands=True, words=4)


def _messages(path: str, answer: Callable[[], Answer], *, tokens: int = 4, **asked: Any) -> Ask:
    """A chat."""

    def write(talk: Talk, prompts: list[str]) -> Any:
        messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": prompts[0]}]
        return {"model": talk.model, "messages": messages, "max_tokens": tokens, **asked}

    return _form(path, write, answer, strands="n" in asked)


def _completions(answer: Callable[[], Answer], *, prompts: int = 2, **asked: Any) -> Ask:
    def write(talk: Talk, texts: list[str]) -> Any:
        return {"model": talk.model, "prompt": texts, "max_tokens": 4, **asked}

    return _form("/v1/completions", write, answer, prompts=prompts, strands="n" in asked, words=5)


def _generate(*, tokens: int = 4, stream: bool = False, **asked: Any) -> Ask:
    """v2's generate, or its stream."""

    def write(talk: Talk, prompts: list[str]) -> Any:
        return {"text_input": prompts[0], "id": "7", "parameters": {"max_new_tokens": tokens, **asked}}

    path = "/v2/models/{}/generate" + ("_stream" if stream else "")
    return _form(path, write, GenerateEventsAnswer if stream else GenerateReplyAnswer)


async def _streamed_by_grpc(where: HTTP2Line, talk: Talk, **how: Any) -> None:
    """A request of ModelStreamInfer, as vLLM's clients ask."""
    talk.split = _words
    text = f"0.{talk.name} " + "word " * 20
    asked = {"text_input": np.array([text.encode()], object), "stream": np.array([True]), "max_new_tokens": np.array([4])}
    question = questions.grpc_infer(asked, talk.model, stream=True)
    body = in_pieces(talk, question.body or b"", 2, text.encode())
    answer = await ask(where, talk, replace(question, body=None, answer=GRPCTexts), body, **how)
    assert isinstance(answer, GRPCTexts)
    assert talk.name != FRESH or (len(answer.messages) == 4 and not answer.failed)


# -- scenarios -----------------------------------------------------------------------------------------------------------------

_TWO = 2 * 1600
"""Bytes that two requests over HTTP/1.1 may hold: their bodies in two pieces, and a message beyond the send buffer."""


def _http1(name: str, kind: Kind, form: Ask, *, formatted: int = 0, **more: Any) -> Scenario:
    """Over HTTP/1.1; `formatted` is how many words at most a model with formatters is asked for."""
    served: dict[str, Any] = {"model": kind, "family": Family.TEXT, "served": _serving(kind, formatted)}
    return over_http1(name, form, again=True, **{"memory": _TWO, **served, **more})


def _http2(name: str, kind: Kind, form: Ask, *, formatted: int = 0, **more: Any) -> Scenario:
    """Over HTTP/2."""
    served: dict[str, Any] = {"model": kind, "family": Family.TEXT, "served": _serving(kind, formatted)}
    return over_http2(name, form, **{"memory": 2 * (_STREAM + 1600), **served, **more})


def _prompts(talk: Talk, count: int, **asked: Any) -> list[tuple[bytes, bool]]:
    """Prompts as parts; the last one is not taken, where the model ends the session."""
    talk.kept, talk.calls = _bare, count
    prompts = [f"{place}.{talk.name} " + "word " * (10 + 150 * (place == 1)) for place in range(count)]
    if not asked:
        return [(prompt.encode(), True) for prompt in prompts]
    return [(json.dumps({"inputs": prompt, "parameters": asked}).encode(), True) for prompt in prompts]


def _websocket() -> Scenario:
    async def play(stage: Stage) -> None:
        victim, neighbour = stage.talk(VICTIM), stage.talk(NEIGHBOUR, model="n")
        await together(
            over_websocket(stage, victim, _prompts(victim, 3), pace=0.0011),
            over_websocket(stage, neighbour, _prompts(neighbour, 2)),
        )

    async def again(stage: Stage) -> None:
        talk = stage.talk(FRESH)
        await over_websocket(stage, talk, _prompts(talk, 2))

    return Scenario(
        name="text-websocket", wire="websocket", model=session, family=Family.TEXT, play=play, again=again,
        served=_serving(session, 0), memory=2 * (_HTTP + 2 * 800), buffer=600,
    )  # fmt: skip


def _bidi(name: str, kind: Kind, **asked: Any) -> Scenario:
    async def converse(line: HTTP2Line, talk: Talk, **how: Any) -> None:
        await bidi_talk(line, talk, _prompts(talk, 2 if talk.name == VICTIM else 1, **asked), **how)

    return _http2(name, kind, converse, memory=3 * (_STREAM + 800))


def _with(**lmi: Any) -> Config:
    return replace(_SMALL, lmi=LMIConfig(**lmi))


def _scenarios() -> Iterator[Scenario]:
    chat, predictions, invoke = "/v1/chat/completions", "/predictions/{}", "/models/{}/invoke"
    platform, stream = "/endpoints/{}/invocations", "/endpoints/{}/invocations-response-stream"
    usage: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    yield _http1("chat", coroutine, _messages(chat, Document))
    yield _http2("chat-h2", session, _messages(chat, Document, n=2))
    yield _http1("chat-stream", async_generator, _messages(chat, Chunks, tokens=8, **usage))
    yield _http2("chat-stream-h2", session, _messages(chat, Chunks, n=2, **usage))
    yield _http1("chat-counted", counted, _messages(chat, Chunks, stop=["never"], **usage))
    yield _http2("completions-counted-h2", counted, _completions(Chunks, **usage))
    yield _http1("completions", generator, _completions(Document))
    yield _http1("completions-stream", session, _completions(Chunks, n=2, **usage))
    yield _http2("completions-stream-h2", async_generator, _completions(Chunks, prompts=3, stream=True))

    yield _http1("messages", quick_generator, _messages(predictions, Chunks, stream=True))
    yield _http2("messages-h2", function, _messages(invoke, Document))
    lines = _with(output_formatter="jsonlines_chat")
    yield _http2("messages-streamed-h2", session, _messages(stream, partial(WithinEvents, ChatLines)), config=lines)

    yield _http1("lmi-json", async_generator, _lmi(predictions, Document, details=True))
    yield _http2("lmi-json-h2", function, _lmi(platform, Document, details=True))
    best: dict[str, Any] = {"n": 2, "best_of": 3, "do_sample": True, "details": True, "top_n_tokens": 2}
    yield _http1("best-of", session, _lmi(predictions, Document, several=True, **best))
    yield _http2("best-of-h2", session, _lmi(invoke, Document, several=True, **best))
    sse: dict[str, Any] = {"output_formatter": "sse", "details": True}
    yield _http1("lmi-sse", generator, _lmi(predictions, LMIEvents, max_new_tokens=8, **sse))
    yield _http2("lmi-sse-h2", async_generator, _lmi(predictions, LMIEvents, **sse))
    yield _http1("lmi-parts", parts, _lmi(predictions, LMIEvents, max_new_tokens=8, **sse))
    tgi = _with(tgi_compat=True)
    yield _http1("tgi", coroutine, _lmi(predictions, Document), config=tgi)
    yield _http1("tgi-stream", session, _lmi(invoke, LMIEvents, stream=True, top_n_tokens=2), config=tgi)
    yield _http2("tgi-stream-h2", quick_generator, _lmi(predictions, LMIEvents, stream=True, max_new_tokens=8), config=tgi)

    batch, batch_lines = _with(rolling_batch="disable"), _with(rolling_batch="disable", enable_streaming=True)
    yield _http1("dynamic", function, _batch(predictions, Document), config=batch)
    # that a transport is broken shows when something is said, and a third prompt says nothing for long
    some: dict[str, Any] = {"config": batch_lines, "without": frozenset(["transport"])}
    yield _http1("dynamic-lines", async_generator, _batch(predictions, BatchLines), **some)
    yield _http1("dynamic-rude", async_generator, _batch(predictions, BatchLines), rude=True, **some)
    yield _http2("dynamic-lines-h2", generator, _batch(invoke, BatchLines), config=batch_lines)
    yield _http2(
        "dynamic-streamed-h2", async_generator, _batch(stream, partial(WithinEvents, BatchLines)), config=batch_lines
    )

    as_it_is: Callable[[Talk, list[str]], Any] = lambda talk, prompts: prompts[0]  # noqa: E731
    text = _form(predictions, as_it_is, WrittenLines)
    yield _http1("formatted", async_generator, text, formatted=4)
    yield _http2("formatted-h2", session, text, formatted=8)
    yield _http1("formatted-invoked", generator, _form(platform, as_it_is, WrittenLines), formatted=8)

    yield _http1("v2-generate", coroutine, _generate())
    yield _http1("v2-generate-stream", generator, _generate(stream=True))
    yield _http2("v2-generate-stream-h2", session, _generate(stream=True))

    yield _websocket()
    yield _bidi("text-bidi", async_generator)
    yield _bidi("text-bidi-threads", generator)

    yield _http1("more-chat", careless, _messages(chat, Chunks, stream=True))
    yield _http2("more-completions-h2", careless, _completions(Document))
    yield _http1("more-lmi", careless, _lmi(predictions, LMIEvents, **sse))
    yield _http2("more-tgi-h2", careless, _lmi(predictions, Document), config=tgi)
    yield _http1("more-dynamic", careless, _batch(predictions, BatchLines), **some)
    yield _http1("more-formatted", careless, text, formatted=4)
    # there, an error of a request is a message and no ending
    yield _http2("grpc-text", session, _streamed_by_grpc, without=frozenset(["raise"]))
    yield _http1("more-v2-generate", careless, _generate())
    yield _http2("more-v2-generate-stream-h2", careless, _generate(stream=True))
    yield _bidi("more-bidi", careless, max_new_tokens=4)

    cut: dict[str, Any] = {"stop_sequences": _STOPS, "include_stop_str_in_output": False}
    yield _http1("stop-chat", careless, _messages(chat, Chunks, stream=True, stop=_STOPS))
    yield _http2("stop-completions-h2", careless, _completions(Document, stop=_STOPS))
    yield _http1("stop-lmi", careless, _lmi(predictions, LMIEvents, **sse, **cut))
    yield _http1("stop-tgi", careless, _lmi(predictions, LMIEvents, stream=True, **cut), config=tgi)
    yield _http2("stop-dynamic-h2", careless, _batch(invoke, BatchLines, **cut), config=batch_lines)
    yield _http1("stop-v2-generate", careless, _generate(**cut))
    yield _http2("stop-v2-generate-stream-h2", careless, _generate(stream=True, **cut))
    yield _bidi("stop-bidi", careless, **cut)

    # `ahead`: words of 400 bytes in the send buffer, the pipe, the client's read, and the model
    slow: dict[str, Any] = {"pace": 0.001, "ahead": 6}
    yield _http1("slow", endless, _messages(chat, Chunks, tokens=9, stream=True), **slow)
    yield _http2("slow-h2", endless, _messages(chat, Chunks, tokens=9, stream=True), **slow)
    yield _http1("slow-lmi", endless, _lmi(predictions, LMIEvents, max_new_tokens=9, **sse), **slow)
    yield _http1(
        "slow-lines", endless, _lmi(predictions, partial(BatchLines, 1), max_new_tokens=9), config=batch_lines, **slow
    )
    yield _http1("slow-formatted", endless, text, formatted=9, **slow)
    yield _http1("slow-v2", endless, _generate(stream=True, tokens=9), **slow)


TEXT: dict[str, Scenario] = {scenario.name: scenario for scenario in _scenarios()}
