"""gRPC: framing, compression, status, metadata, heads of both roles, and the messages of the Open Inference Protocol."""
