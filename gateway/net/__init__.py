"""Bytes below every wire: sockets, TLS, and who tells that they are ready. May import config."""
