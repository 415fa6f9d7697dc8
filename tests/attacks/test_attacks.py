"""The attacks that are not left to the night, each for a second, with the server's garbage collector off: what no machine is too slow for must hold."""

from __future__ import annotations

import sys

import pytest

from tests.attacks.attack import attacks
from tests.attacks.run import broken, run

ATTACKS = {name: attack for name, attack in attacks().items() if not attack.nightly}


@pytest.mark.programs
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel is asked for the server's peak of memory")
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_costs_its_maker_alone(name: str) -> None:
    row = run(ATTACKS[name], seconds=1.0, collector=False)
    assert not (said := broken(ATTACKS[name], row)), "\n".join(said)
