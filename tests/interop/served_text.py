"""Text models that real clients of LMI, TGI and OpenAI call: they count, tell what they see, wait for a word, fail, or are
slow to stop; and what a test says to them."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import trio

from models.adapt import spec_of
from models.chat import ChatMessage
from models.errors import ContextLengthExceeded, ModelError
from models.messages import FinishReason, GenerationParameters, Part, Prompt, Token, TopToken
from models.session import Session
from models.spec import ModelSpec

PATIENCE = 120.0
"""Seconds after which a test that waits has failed."""

SECRET = "a secret of the server"

_events: defaultdict[str, trio.Event] = defaultdict(trio.Event)
_begun: Counter[str] = Counter()


async def switch(session: Session[Part, Part]) -> None:
    """`set NAME` or `wait NAME`: how a test and the other models tell one another where they are."""
    async for part in session:
        verb, _, name = bytes(part.data).decode().partition(" ")
        if verb == "set":
            _events[name].set()
        else:
            await _events[name].wait()
        await session.send(part)


async def counted(session: Session[Prompt, Token]) -> None:
    """The tokens ` 0`, ` 1` ... with ids from 100, as many as asked for, in each of `n` sequences; and whatever details are
    asked for, each other than the others. A prompt has as many tokens as words."""
    async for prompt in session:
        session.prompt_tokens = len(prompt.text.split())
        asked = prompt.parameters
        if asked.decoder_input_details:
            for i, word in enumerate(prompt.text.split()):
                await session.send(Token(text=word, id=i, log_prob=-1.0 if i else None, prefill=True))
        wanted = max(asked.top_n_tokens, asked.logprobs or 0)
        for i in range(asked.max_new_tokens):
            top = tuple([TopToken(text=f" {i + k}", id=100 + i + k, log_prob=-0.5 - k) for k in range(wanted)])
            finish = FinishReason.LENGTH if i + 1 == asked.max_new_tokens else None
            for sequence in range(asked.n):
                await session.send(Token(text=f" {i}", id=100 + i, log_prob=-0.5, top=top, finish=finish, sequence=sequence))


async def told(prompt: Prompt) -> AsyncIterator[Token]:
    """One token: the prompt and its parameters as JSON."""
    seen = {name: getattr(prompt.parameters, name) for name in prompt.parameters.__struct_fields__}
    text = json.dumps({"text": prompt.text, **seen}, default=dict)
    yield Token(text=text, id=1, log_prob=-0.5, finish=FinishReason.EOS_TOKEN)


# its text has the stop sequences in it, and does not end there
told.parameters = frozenset(GenerationParameters.__struct_fields__)  # type: ignore[attr-defined]


async def words(prompt: Prompt) -> AsyncIterator[Token]:
    """The prompt's own words once more."""
    for word in prompt.text.split():
        yield Token(text=f" {word}", id=len(word), log_prob=-0.5)


def shout(prompt: Prompt) -> Iterator[str]:
    """The prompt's own words, loud, as a plain generator that looks at no parameter."""
    for word in prompt.text.split():
        yield word.upper() + " "


async def stepped(prompt: Prompt) -> AsyncIterator[str]:
    """A token, and the next when somebody has set `TEXT:0`, `TEXT:1` and so on. It sets `TEXT:begun`, and cancelled
    `TEXT:cancelled`."""
    try:
        _events[f"{prompt.text}:begun"].set()
        for i in range(prompt.parameters.max_new_tokens):
            yield f" {i}"
            await _events[f"{prompt.text}:{i}"].wait()
    except trio.Cancelled:
        _events[f"{prompt.text}:cancelled"].set()
        raise


async def stubborn(prompt: Prompt) -> AsyncIterator[str]:
    """A token and then nothing. Cancelled, it sets `TEXT:stopping` and goes on until somebody has set `TEXT:let go`; then it
    sets `TEXT:gone`."""
    yield " 0"
    try:
        await trio.sleep_forever()
    except trio.Cancelled:
        _events[f"{prompt.text}:stopping"].set()
        with trio.move_on_after(PATIENCE, shield=True):
            await _events[f"{prompt.text}:let go"].wait()
            _events[f"{prompt.text}:gone"].set()
        raise


async def met(prompt: Prompt) -> AsyncIterator[str]:
    """The prompt, which is `NAME NUMBER`, and the rest when somebody has set `NAME:go`. The nth that comes sets `NAME:n`."""
    name = prompt.text.partition(" ")[0]
    _begun[name] += 1
    _events[f"{name}:{_begun[name]}"].set()
    yield f"{prompt.text}"
    await _events[f"{name}:go"].wait()
    yield " is over"


async def failing(prompt: Prompt) -> AsyncIterator[str]:
    """Two tokens, unless the prompt is `dry`, then an error that is the client's to see. A prompt `long` is too long for it."""
    if prompt.text == "long":
        raise ContextLengthExceeded(40, 32, prompt_tokens=36)
    if prompt.text != "dry":
        yield " 0"
        yield " 1"
    raise ModelError("the text ran dry", code="Dry")


async def crashing(prompt: Prompt) -> AsyncIterator[str]:
    """Sends two tokens, then raises an error whose text no client may see."""
    yield " 0"
    yield " 1"
    raise RuntimeError(SECRET)


def _last_said(messages: Sequence[ChatMessage]) -> str:
    return messages[-1].content


_MODELS = (counted, told, words, shout, stepped, stubborn, met, failing, crashing)


def text(model: str, **options: str) -> ModelSpec:
    """The model of that name, with options as its own serving.properties would have them. The last message of a conversation
    is its prompt."""
    functions = {function.__name__: function for function in _MODELS}
    return spec_of(functions[model], options=options, chat_template=_last_said)


# ---- the server


def _table(name: str, model: str, more: str = "", **options: str) -> str:
    given = ", ".join(f"{key} = {json.dumps(value)}" for key, value in {"model": model, **options}.items())
    return f'[models.{name}]\nfactory = "served_text:text"\noptions = {{ {given} }}\n{more}'


def configuration(*settings: str) -> list[str]:
    """The lines that serve them after these lines: each by its name, in TGI's form as `tgi-NAME`, in LMI's with events as
    `sse-NAME`. The library's `lm` beside them."""
    names = [function.__name__ for function in _MODELS]
    return [
        *settings,
        '[models.lm]\nfactory = "models.library.lm:LanguageModel.load"',
        '[models.switch]\nfactory = "served_text:switch"',
        *[_table(name, name) for name in names],
        *[_table(f"tgi-{name}", name, tgi_compat="true") for name in names],
        *[_table(f"sse-{name}", name, output_formatter="sse") for name in names],
        *[_table(f"chat-{name}", name, output_formatter="jsonlines_chat") for name in ("counted", "failing")],
        _table("held", "stepped", "capacity = 1\nqueue = 0"),
        _table("tgi-held", "stepped", "capacity = 1\nqueue = 0", tgi_compat="true"),
        _table("dynamic", "words", rolling_batch="disable"),
        _table("dynamic-stream", "words", rolling_batch="disable", enable_streaming="true"),
        _table("dynamic-failing", "failing", rolling_batch="disable"),
    ]


# ---- commands of a test to the models

T = TypeVar("T")


def tell(url: str, said: str) -> None:
    """`set NAME`, or `wait NAME`, which returns when the model has come so far, and fails the test when it does not."""
    request = urllib.request.Request(f"{url}/models/switch/invoke", said.encode(), {"content-type": "text/plain"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        assert answer.read() == said.encode()


def twenty_at_once(url: str, name: str, good: Callable[[str], str], bad: Callable[[], Any]) -> None:
    """Nineteen good calls of `met` are in the middle of their answers when `bad` makes its own; theirs must be whole.
    `good` calls it with a prompt and returns the text."""
    prompts = [f"{name} {n}" for n in range(19)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        calls = [pool.submit(good, prompt) for prompt in prompts]
        try:
            tell(url, f"wait {name}:{len(prompts)}")
            bad()
            assert not any(call.done() for call in calls)
        finally:
            tell(url, f"set {name}:go")
        assert [call.result(PATIENCE) for call in calls] == [f"{prompt} is over" for prompt in prompts]


@contextmanager
def holding(url: str, model: str, name: str) -> Iterator[None]:
    """The only slot of that model, which is `stepped`, is taken until the end of the block."""
    body = json.dumps({"inputs": name, "parameters": {"max_new_tokens": 2}}).encode()  # with its last it would be over
    request = urllib.request.Request(f"{url}/predictions/{model}", body, {"content-type": "application/json"})

    def call() -> None:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            answer.read()

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(call)
        try:
            tell(url, f"wait {name}:begun")
            yield
        finally:
            tell(url, f"set {name}:0")
        held.result(PATIENCE)


def within_patience(call: Callable[[], T]) -> T:
    """Calls a client that might never return, and returns its result or raises its exception; fails the test if it hangs."""
    done: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            done.append(call())
        except BaseException as e:
            raised.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "the client waits for ever"
    if raised:
        raise raised[0]
    return done[0]
