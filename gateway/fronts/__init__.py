"""Several processes behind one port: a parent that accepts connections, and fronts that serve them. Imports gateway.py and
below."""
