"""What a gateway tells of itself: the log, metrics, spans. May import config, core, wires and workers."""
