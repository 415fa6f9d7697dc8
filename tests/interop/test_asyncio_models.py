"""openai's AsyncOpenAI and aiohttp's client, unmodified, as models: in processes whose loop is asyncio's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.interop import served_asyncio
from tests.interop.servers import Server, serving
from tests.ports import free_port

pytestmark = [
    pytest.mark.usefixtures("openai"),  # before any server: where it is absent, none need start
    pytest.mark.filterwarnings("default"),  # its own
]
PATIENCE = 120.0
MODELS = pytest.mark.parametrize("model", ["by_openai", "by_aiohttp"])


@pytest.fixture(scope="module")
def openai(needs: Callable[[str, str], Any]) -> Any:
    needs("aiohttp", "aiohttp")
    return needs("openai", "openai")


@pytest.fixture(scope="module")
def diary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("diary") / "diary"


@pytest.fixture(scope="module")
def asyncio_server(diary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The models of tests/interop/served_asyncio.py."""
    port = free_port()  # which its models have to know
    settings = served_asyncio.configuration(str(diary), f"http://127.0.0.1:{port}")
    with serving(tmp_path_factory.mktemp("asyncio"), "served_asyncio.py", settings, port=port) as server:
        yield server


@pytest.fixture
def client(openai: Any, asyncio_server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{asyncio_server.url}/v1", api_key="any", timeout=PATIENCE, max_retries=0) as client:
        yield client


def made(diary: Path, name: str) -> int:
    """Waits until a session of `source` with this name is over: how many tokens it has made."""
    until = time.monotonic() + PATIENCE
    while not (found := [line for line in (diary.read_text().splitlines() if diary.exists() else ()) if name in line]):
        assert time.monotonic() < until, name
        time.sleep(0.01)
    return int(found[0].split()[-1])


def text_of(stream: Any) -> str:
    return "".join([piece.choices[0].delta.content or "" for piece in stream if piece.choices])


def ask(client: Any, model: str, text: str, **more: Any) -> Any:
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}], **more)


@MODELS
def test_what_a_model_asks_of_another_comes_through_whole_and_in_a_stream(client: Any, model: str) -> None:
    said = "".join(f" {n}" for n in range(40))
    assert ask(client, model, "hello", max_tokens=40).choices[0].message.content == said
    pieces = list(ask(client, model, "hello", max_tokens=40, stream=True))
    assert text_of(pieces) == said
    assert len([piece for piece in pieces if piece.choices and piece.choices[0].delta.content]) > 1


@MODELS
def test_thirty_at_once(client: Any, model: str) -> None:
    said = "".join(f" {n}" for n in range(30))
    with ThreadPoolExecutor(30) as pool:
        calls = [pool.submit(lambda: text_of(ask(client, model, "hello", max_tokens=30, stream=True))) for _ in range(30)]
        assert [call.result(PATIENCE) for call in calls] == [said] * 30


@MODELS
def test_a_client_that_leaves_stops_both_models(client: Any, model: str, diary: Path) -> None:
    with ask(client, model, f"{model} leaves", max_tokens=60_000, stream=True) as stream:
        for piece in stream:
            if piece.choices and piece.choices[0].delta.content == " 3":
                break
    assert made(diary, f"{model} leaves") < 59_000


def test_an_error_that_the_client_raises_in_the_model_is_its_sessions_alone(client: Any, openai: Any) -> None:
    with pytest.raises(openai.APIError, match="incident"):
        text_of(ask(client, "by_openai", "break", max_tokens=10, stream=True))
    with pytest.raises(openai.APIError, match="incident"):
        ask(client, "by_openai", "break", max_tokens=10)
    assert ask(client, "by_openai", "hello", max_tokens=2).choices[0].message.content == " 0 1"
