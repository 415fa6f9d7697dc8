"""The Open Inference Protocol, v2, with Triton's extensions. May import what dialects may, text and telemetry."""
