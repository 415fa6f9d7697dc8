"""The bounds of all loops, and of all calls that take a message in."""
