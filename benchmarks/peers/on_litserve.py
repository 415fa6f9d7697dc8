"""The model `floods` on LitServe, with its default loop: python -m benchmarks.peers.on_litserve PORT."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import litserve

from benchmarks.served import flood_events


class Floods(litserve.LitAPI):  # type: ignore[misc]
    """Streams as many tokens as the request asks for."""

    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request):  # type: ignore[no-untyped-def]  # LitServe reads annotations: with none it takes JSON
        return request["max_tokens"]

    def predict(self, x: int) -> Iterator[bytes]:
        yield from flood_events(x)

    def encode_response(self, output: Iterator[bytes]) -> Iterator[bytes]:
        yield from output


if __name__ == "__main__":
    server = litserve.LitServer(
        Floods(stream=True, api_path="/v1/completions"), accelerator="cpu", devices=1, workers_per_device=1, timeout=False
    )
    server.run(
        host="127.0.0.1", port=int(sys.argv[1]), num_api_servers=1, log_level="error", generate_client_file=False
    )  # fmt: skip
