"""Real clients of HTTP/2 are never ended: some hundreds of calls of each that is installed, and ten thousand with `pytest --soak`."""

from __future__ import annotations

import pytest

from tests.attacks.legal import CLIENTS, call
from tests.interop.conftest import absent


@pytest.mark.programs
@pytest.mark.parametrize("calls", [500, pytest.param(10_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", CLIENTS)
def test_a_real_client_is_never_ended(name: str, calls: int) -> None:
    if not CLIENTS[name].present():
        absent(name)
    found = call(CLIENTS[name], calls)
    assert not found.wrong
    assert found.connections or CLIENTS[name].tls
