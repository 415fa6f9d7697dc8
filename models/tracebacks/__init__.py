"""The tracebacks that people see: the lines of a model's author, with the frames of everywire folded."""
