"""The operator plane manages and watches a gateway over HTTP, on a separate port. Clients of models never need it.

May import hypercorn, wires, telemetry, workers, catalog, serving, core, net and config.
"""
