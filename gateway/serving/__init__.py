"""From sockets to handlers and back: who comes in, what answers. May import core, wires, net, config, workers, telemetry."""
