"""Real clients of HTTP/2 are never ended: some hundreds of calls of each that is installed."""

from __future__ import annotations

import pytest

from tests.attacks.legal import CLIENTS, call
from tests.interop.conftest import absent


@pytest.mark.programs
@pytest.mark.parametrize("name", CLIENTS)
def test_a_real_client_is_never_ended(name: str) -> None:
    if not CLIENTS[name].present():
        absent(name)
    found = call(CLIENTS[name], 500)
    assert not found.wrong
    assert found.connections or CLIENTS[name].tls
