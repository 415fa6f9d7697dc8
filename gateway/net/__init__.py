"""The bytes below every wire: sockets, TLS, and the tasks that learn which sockets are ready. May import config."""
