"""Dialects: the bytes of an exchange become the messages of a session."""
