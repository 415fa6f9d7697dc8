"""gRPC: framing, compression, status, metadata, heads of both roles, messages of the Open Inference Protocol, reflection."""
