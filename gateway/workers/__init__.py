"""Model workers and the rules by which they are restarted."""
