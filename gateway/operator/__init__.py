"""The operator plane: what manages a gateway and watches it, over HTTP, on a port that no client of a model needs.

May import hypercorn, wires, telemetry, workers, catalog, serving, core, net and config.
"""
