"""Floors: servers that do only what Python, Trio and the kernel demand, and check nothing. Never put one on a network."""
