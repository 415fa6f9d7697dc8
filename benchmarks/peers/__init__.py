"""Other servers with the model `floods` of `benchmarks.served`, for `python -m benchmarks stalled`."""
