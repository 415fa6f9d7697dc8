"""Attacks on a server in its own process, with good clients beside them: what an attacker may cost. `python -m tests.attacks`."""
