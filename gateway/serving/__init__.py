"""From sockets to handlers and back: who is accepted, what answers. May import core, wires, net, config and workers."""
