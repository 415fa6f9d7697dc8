"""The commands for a first model: serve a file as it is, serve it anew at each change, and make a new one."""
