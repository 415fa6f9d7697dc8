"""`everywire call`: one call of a model of a running server, over any wire, printed as it arrives."""
