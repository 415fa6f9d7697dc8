"""`everywire top`: a running server at a glance, in a terminal."""
