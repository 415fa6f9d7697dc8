"""Logs, metrics and spans of a gateway. May import config, core, wires and workers."""
