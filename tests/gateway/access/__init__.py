"""Access: keys on every wire, and the pages of browsers."""
