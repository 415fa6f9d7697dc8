"""The load: a client in a process of its own that keeps a server busy and counts what it answers."""
