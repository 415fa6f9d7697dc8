"""Models of other libraries, which are imported where one is loaded: each says which extra brings it."""
