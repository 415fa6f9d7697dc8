"""A gateway on a loopback port in a thread: for blocking clients, for the time of a block."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from typing import Any

import pytest
import trio

from gateway.config import Config, LimitsConfig
from gateway.testing import ScriptedServer, loopback_gateway, scripted_gateway
from models.messages import Prompt


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def chat(server: ScriptedServer, text: str) -> str:
    body = {"model": server.name, "messages": [{"role": "user", "content": text}]}
    return str(post(f"{server.base_url}/chat/completions", body)["choices"][0]["message"]["content"])


async def shout(prompt: str) -> str:
    return prompt.upper()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "loopback" in thread.name]


def test_a_blocking_client_calls_any_model() -> None:
    with loopback_gateway([shout], Config(limits=LimitsConfig(body=100))) as gateway:
        (address,) = gateway.addresses
        assert address == f"http://127.0.0.1:{gateway.port}"
        assert post(f"{address}/predictions/shout", {"inputs": "one"}) == {"generated_text": "ONE"}
        with pytest.raises(urllib.error.HTTPError, match="413"):
            post(f"{address}/predictions/shout", {"inputs": "one" * 100})
        assert threads() == ["everywire loopback gateway"]
    assert threads() == []
    with pytest.raises(urllib.error.URLError):
        post(f"{address}/predictions/shout", {"inputs": "one"})


def test_a_scripted_model_answers_and_remembers() -> None:
    with scripted_gateway([lambda prompt: f"{len(prompt.text)} characters"]) as server:
        assert chat(server, "one") == "20 characters"
        assert [prompt.text for prompt in server.prompts] == ["User: one\nAssistant:"]


def test_an_answer_that_still_runs_is_cut_at_the_end() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def wait(prompt: Prompt) -> str:
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()
        return ""

    def ask() -> None:
        with suppress(OSError, HTTPException):
            chat(server, "x")
            answered.set()

    answered = threading.Event()
    with scripted_gateway([wait]) as server:
        asking = threading.Thread(target=ask)
        asking.start()
        assert begun.wait(30)
    assert cancelled.is_set()
    asking.join(30)
    assert not asking.is_alive()
    assert not answered.is_set()


def test_an_exception_of_the_block_is_raised_as_it_is() -> None:
    with pytest.raises(KeyError, match="mine"), scripted_gateway():
        raise KeyError("mine")
    assert threads() == []


def test_a_bad_model_is_refused_before_a_thread_begins() -> None:
    with pytest.raises(ValueError, match="two models are named 'shout'"), loopback_gateway([shout, shout]):
        pass
    assert threads() == []


async def test_it_serves_in_a_task_of_an_event_loop_too() -> None:
    with scripted_gateway(["hello"]) as server:
        assert await trio.to_thread.run_sync(chat, server, "x") == "hello"
