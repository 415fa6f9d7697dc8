"""Each loop, and each call that takes a message in, has a row in `bounds.txt` that names what bounds it."""

from __future__ import annotations

import ast

import pytest

from tests.bounds.finding import Place, Site, sites
from tests.bounds.table import GRAMMAR, TABLE, Rows, TableError, faults, rows_of
from tests.test_architecture import FILES, ROOT, parsed

OWED: set[str] = {
    "gateway/hypercorn.py",
}


def rows() -> Rows:
    return rows_of(TABLE.read_text())


def test_each_loop_and_each_call_that_takes_a_message_in_has_a_bound() -> None:
    told, table = [], dict(rows())
    for path in FILES:
        file = str(path.relative_to(ROOT))
        told += faults(file, sites(parsed(path)), table.pop(file, {}))
    told += [f"{file} is not there any more: take it away, with its rows" for file in table]
    assert told == [], "\n".join([f"{TABLE.relative_to(ROOT)}:", *told, GRAMMAR])


def test_few_bounds_are_owed() -> None:
    assert {file for file, known in rows().items() if any(row.bound.startswith("owed") for row in known.values())} == OWED


# -- the rule can fail -------------------------------------------------------------------------------------------------

PLANTED = """
import json
SIZE = 4096
class Reader:
    async def read(self, machine, socket, items):
        while True:
            event = machine.next_event()
            if event is None:
                await socket.wait_readable()
        while items:
            items.pop()
    def take(self, sock, file, body):
        return sock.recv(SIZE), sock.recv_into(body), file.read(), json.loads(body), body[:100].decode(), body.decode()
    async def all(self, session, machine):
        async for message in session:
            await self.receive_some(message)
        return [part async for part in session], machine.receive_data(b""), machine.receive_eof()
def inner():
    def deep():
        while True:
            pass
    return [lambda data: data.decode()]
"""
GOOD = """
gateway/planted.py
    Reader.read | while | waits socket.wait_readable
    Reader.read | while 2 | walks items | what was given
    Reader.read | next_event | limits.head
    Reader.take | recv | protocols.sse:MAX_EVENT
    Reader.take | recv_into | walks body
    Reader.take | read | models.*.load_timeout
    Reader.take | loads | :GRAMMAR
    Reader.take | decode x2 | cut [:100]
    Reader.all | async for | waits session
    Reader.all | async for 2 | walks session
    Reader.all | receive_some | waits self.receive_some
    Reader.all | receive_data | gateway.containers.connection:ContainerLimits.part
    inner.deep | while | limits.body
    inner | decode | walks data
"""
HERE = "tests/bounds/table.py"
"""The module whose constant `GRAMMAR` the rows above name."""


def planted(text: str = PLANTED) -> dict[Place, Site]:
    return sites(ast.parse(text))


def told(table: str, text: str = PLANTED) -> list[str]:
    return faults(HERE, planted(text), rows_of(table)["gateway/planted.py"])


def test_what_is_planted_is_found() -> None:
    wanted = set(rows_of(GOOD)["gateway/planted.py"])
    assert planted().keys() == wanted
    assert told(GOOD) == []


@pytest.mark.parametrize("place", list(rows_of(GOOD)["gateway/planted.py"]), ids=" ".join)
def test_a_site_without_a_row_fails_and_says_what_to_add(place: Place) -> None:
    name, kind = place
    without = "\n".join(
        line for line in GOOD.split("\n") if not line.startswith(f"    {name} | {kind} ") or f"{kind} 2" in line
    )
    if (name, kind) in (("Reader.read", "while 2"), ("Reader.all", "async for 2")):
        without = "\n".join(line for line in GOOD.split("\n") if not line.startswith(f"    {name} | {kind} "))
    if kind == "decode" and name == "Reader.take":
        without = "\n".join(line for line in GOOD.split("\n") if not line.startswith("    Reader.take | decode"))
    (fault,) = told(without)
    assert f"add:\n    {name} | {kind}" in fault
    assert fault.endswith("| BOUND | WHY")


@pytest.mark.parametrize(
    "new",
    [
        "    while held:\n        held.pop()",
        "    for _ in []:\n        while True: pass",
        "    return json.loads(held)",
        "    return [read() for read in [held.read1]] and held.readline()",
        "    with held: return held.receive_body(1)",
        "    return (lambda: held.recv_fds(1))()",
        "    return held.decode('utf-8')",
    ],
)
def test_a_new_loop_or_call_in_a_known_file_fails(new: str) -> None:
    assert len(told(GOOD, f"{PLANTED}\ndef new(held):\n{new}\n")) >= 1
    assert len(told(GOOD, f"{PLANTED}\nasync def new(held):\n{new}\n")) >= 1


@pytest.mark.parametrize(
    ("good", "wrong", "word"),
    [
        ("while 2 | walks items", "while 2 | walks pieces", "no 'pieces'"),
        ("while | waits socket.wait_readable", "while | waits socket.wait_writable", "does not await"),
        ("limits.head", "limits.heads", "neither a setting"),
        ("models.*.load_timeout", "models.load_timeout", "neither a setting"),
        (":GRAMMAR", ":GRAMMER", "has no GRAMMER"),
        ("protocols.sse:MAX_EVENT", "protocols.ssse:MAX_EVENT", "cannot be imported"),
        ("ContainerLimits.part", "ContainerLimits.parts", "has no ContainerLimits.parts"),
        ("cut [:100]", "cut [:200]", "not cut"),
        ("decode x2", "decode x3", "counts 3, there are 2"),
        ("while | limits.body", "while | a good reason", "neither a setting"),
        ("while | limits.body", "while |", "neither a setting"),
    ],
)
def test_a_bound_that_is_not_there_fails(good: str, wrong: str, word: str) -> None:
    assert GOOD.count(good) == 1
    (fault,) = told(GOOD.replace(good, wrong))
    assert word in fault


def test_a_row_whose_loop_has_gone_fails() -> None:
    (fault,) = told(GOOD + "    Reader.gone | while | limits.body\n")
    assert "has no Reader.gone | while any more" in fault
    assert len(told(GOOD, PLANTED.replace("while items:", "if items:"))) == 1


@pytest.mark.parametrize(
    "bad", ["    a | while | limits.body", "a.py\n    a | while", "a.py\na.py", "a.py\n    a | b | c\n    a | b | d"]
)
def test_a_table_that_cannot_be_read_is_refused(bad: str) -> None:
    with pytest.raises(TableError, match="line"):
        rows_of(bad)
