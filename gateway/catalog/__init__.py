"""Models by name, from code and from folders. May import config, codecs and workers."""
