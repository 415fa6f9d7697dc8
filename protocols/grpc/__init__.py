"""gRPC over HTTP/2: message framing and compression, status, metadata, and the heads and trailers of both roles."""
