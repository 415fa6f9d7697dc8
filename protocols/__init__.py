"""Sans-IO protocol machines: bytes in, events out, and no clock, socket or thread of their own."""
