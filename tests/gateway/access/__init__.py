"""Who may call: keys on every wire, and the pages of browsers."""
