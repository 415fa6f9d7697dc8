"""gRPC: framing, status and metadata, and the messages of the Open Inference Protocol."""
