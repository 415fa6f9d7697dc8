"""Several processes behind one port: a parent that accepts, and the fronts that serve. Imports gateway.py and below."""
