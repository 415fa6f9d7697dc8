"""From sockets to handlers: accepts, routes, permits, drains. May import core, wires, net, config, workers, telemetry."""
