"""The Open Inference Protocol, v2, with Triton's extensions. May import the text dialects."""
