"""gRPC: v2's service, health and reflection, over HTTP/2 alone."""
