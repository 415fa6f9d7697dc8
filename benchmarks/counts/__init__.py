"""Counts of the work of a unit, which are the same on every machine, and the ceilings that they must not pass."""
