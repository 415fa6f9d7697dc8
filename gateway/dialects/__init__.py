"""Dialects: the bytes of an exchange become the messages of a session.

May import catalog, codecs, config, core and workers.
"""
