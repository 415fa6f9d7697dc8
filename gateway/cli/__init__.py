"""The command line. May import anything."""
