"""Model containers as users write them, each a program of its own: `python FILE PORT`, which says where it listens."""
