"""The attacks, with what no machine is too slow for: one of each kind for a second, and all of them, for longer, with `pytest --soak`."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from tests.attacks.attack import attacks
from tests.attacks.run import broken, run

ATTACKS = attacks()
OF_CONNECTIONS = ("tls-", "container-", "metrics-", "closed-", "reset-streams", "goodbye-streams")
"""How the names of attacks begin that are about a connection: several processes share their connections."""


@pytest.mark.programs
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel is asked for the server's peak of memory")
@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if not attack.nightly])
def test_an_attack_costs_its_maker_alone(name: str) -> None:
    row = run(ATTACKS[name], seconds=1.0, collector=False)
    assert not (said := broken(ATTACKS[name], row)), "\n".join(said)


@pytest.mark.soak
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel is asked for the server's peak of memory")
@pytest.mark.parametrize("collector", [True, False], ids=["collector", "no collector"])
@pytest.mark.parametrize("name", ATTACKS)
def test_each_attack_for_some_seconds_costs_its_maker_alone(name: str, collector: bool) -> None:
    row = run(ATTACKS[name], seconds=5.0, collector=collector, to_the_end=True)
    assert not (said := broken(ATTACKS[name], row)), "\n".join(said)


@pytest.mark.soak
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="several processes need Linux")
@pytest.mark.parametrize("name", [name for name in ATTACKS if name.startswith(OF_CONNECTIONS)])
def test_an_attack_on_two_processes_costs_its_maker_alone(name: str) -> None:
    attack = ATTACKS[name]
    attack = replace(attack, growth=2 * attack.growth, after=2 * attack.after, stop=attack.stop and attack.stop + 1)
    row = run(attack, seconds=5.0, to_the_end=True, processes=2)
    assert not (said := broken(attack, row)), "\n".join(said)
