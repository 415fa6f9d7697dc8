"""Model workers, and the rules by which they are restarted. May import config."""
