"""Models that are clients of the gateway that serves them: by openai's AsyncOpenAI and by aiohttp, as their users write them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from models.messages import Prompt

Talk = Callable[[Prompt], AsyncIterator[str]]


@asynccontextmanager
async def by_openai(url: str) -> AsyncIterator[Talk]:
    """Answers with what the model `source` says, asked by OpenAI's own client in a stream."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:

        async def talk(prompt: Prompt) -> AsyncIterator[str]:
            stream = await client.chat.completions.create(
                model="source",
                messages=[{"role": "user", "content": prompt.text}],
                max_tokens=prompt.parameters.max_new_tokens,
                stream=True,
            )
            async with stream:
                async for piece in stream:
                    if piece.choices and (text := piece.choices[0].delta.content):
                        yield text

        yield talk


@asynccontextmanager
async def by_aiohttp(url: str) -> AsyncIterator[Talk]:
    """Talks by aiohttp and LMI's route."""
    import aiohttp

    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(sock_read=60)) as http:

        async def talk(prompt: Prompt) -> AsyncIterator[str]:
            asked = {
                "inputs": prompt.text,
                "parameters": {"max_new_tokens": prompt.parameters.max_new_tokens},
                "stream": True,
            }
            async with http.post("/predictions/source", json=asked) as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    if line.strip():
                        yield json.loads(line)["token"]["text"]

        yield talk


class Source:
    """An engine of asyncio's with background work: one task counts, and each session takes its numbers from a queue of its
    own. A file tells who has left."""

    def __init__(self, diary: str) -> None:
        self._diary, self._queues = diary, set[asyncio.Queue[int]]()

    async def count(self) -> None:
        number = 0
        while True:
            for queue in [*self._queues]:
                if queue.qsize() < 4:
                    queue.put_nowait(number)
            number += 1
            await asyncio.sleep(0.001)

    async def __call__(self, prompt: Prompt) -> AsyncIterator[str]:
        queue = asyncio.Queue[int]()
        self._queues.add(queue)
        made = 0
        try:
            for made in range(prompt.parameters.max_new_tokens):
                await queue.get()
                if "break" in prompt.text and made == 3:
                    raise KeyError("broken")
                yield f" {made}"
        finally:
            self._queues.discard(queue)
            with open(self._diary, "a") as file:  # noqa: ASYNC230  # one line
                file.write(f"{' '.join(prompt.text.split())} left after {made}\n")


@asynccontextmanager
async def source(diary: str) -> AsyncIterator[Source]:
    made = Source(diary)
    work = asyncio.create_task(made.count())
    yield made
    work.cancel()


def configuration(diary: str, url: str) -> list[str]:
    """The lines that serve them at this address."""

    def table(name: str, **options: str) -> str:
        given = ", ".join(f"{key} = {json.dumps(value)}" for key, value in options.items())
        process = 'process = { loop = "asyncio" }'
        return f'[models.{name}]\nfactory = "served_asyncio:{name}"\noptions = {{ {given} }}\n{process}'

    return [table("source", diary=diary), table("by_openai", url=url), table("by_aiohttp", url=url)]
