"""The attacks: each module here is found by itself, and each `@attack` in it."""
