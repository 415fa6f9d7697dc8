"""Telemetry of a gateway: the log, metrics and spans. May import config, core, wires and workers."""
