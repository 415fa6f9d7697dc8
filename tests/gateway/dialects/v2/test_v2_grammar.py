"""A gateway against the grammar of v2 requests, over one connection that every one of them must leave usable."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.dialects.v2.v2_grammar import Sending, choices_of, memory_server, sending_of, table, tensors_of
from tests.protocols.v2.grammar.v2_grammar import CHOICES, Choices, one_of
from tests.protocols.v2.grammar.v2_mutations import BEYOND_THE_CODEC, case_of

SERVED = table(0)


def sending(c: Choices, kind: str = "") -> Sending:
    return sending_of(c, case_of(c, one_of(c, SERVED), kind))


@pytest.mark.parametrize("http2", [False, True], ids=["http1", "http2"])
async def test_every_request_gets_what_is_due_and_leaves_the_connection_usable(http2: bool) -> None:
    async with memory_server(SERVED) as server:
        for number in range(400):
            await server.check(sending(choices_of(0, number)), http2=http2)
        await server.check_budget()
        assert server.connections == 1


@pytest.mark.parametrize("kind", sorted(BEYOND_THE_CODEC))
async def test_what_is_wrong_beyond_the_codec_is_named(kind: str) -> None:
    async with memory_server(SERVED) as server:
        made = [s for number in range(200) if (s := sending(choices_of(1, number), kind)).case.kind == kind][:20]
        assert made
        for each in made:
            await server.check(each, http2=False)
        await server.check_budget()


async def test_refusals_of_every_kind_of_http_are_made() -> None:
    kinds = {sending(choices_of(0, number)).case.kind for number in range(1200)}
    assert {"another model", "an unknown coding", "a damaged coding"} <= kinds


@settings(max_examples=50, derandomize=True, database=None)
@given(st.binary(min_size=CHOICES, max_size=CHOICES))
def test_any_choices_make_a_request(data: bytes) -> None:
    made = sending(Choices(data))
    assert made.pieces or made.chunked
    assert json.loads(tensors_of(made.case.model)).keys() == {"inputs", "outputs", "max_batch_size"}
