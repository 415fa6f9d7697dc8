"""trio-websocket on the container's path."""

import pytest
import trio
import trio_websocket

from tests.interop.servers import Server


@pytest.mark.by_default
async def test_messages_come_back_in_order_and_unchanged(server: Server) -> None:
    url = f"ws://{server.host}:{server.port}/invocations-bidirectional-stream"
    messages: list[str | bytes] = ["hello", "zwölf ✓", b"\x00\xff" * 1000, b"", "x" * 100_000]
    with trio.fail_after(60):
        async with trio_websocket.open_websocket_url(url) as socket:
            for message in messages:
                await socket.send_message(message)
                assert await socket.get_message() == message


async def test_many_messages_in_flight(server: Server) -> None:
    url = f"ws://{server.host}:{server.port}/invocations-bidirectional-stream"
    with trio.fail_after(60):
        async with trio_websocket.open_websocket_url(url) as socket, trio.open_nursery() as nursery:

            async def talk() -> None:
                for i in range(1000):
                    await socket.send_message(f"message {i}")

            nursery.start_soon(talk)
            assert [await socket.get_message() for _ in range(1000)] == [f"message {i}" for i in range(1000)]


async def test_a_model_error_is_a_close_with_its_text(server: Server) -> None:
    url = f"ws://{server.host}:{server.port}/models/failing/invocations-bidirectional-stream"
    with trio.fail_after(60):
        async with trio_websocket.open_websocket_url(url) as socket:
            await socket.send_message("fine")
            assert await socket.get_message() == "fine"
            await socket.send_message("fail")
            with pytest.raises(trio_websocket.ConnectionClosed) as closed:
                await socket.get_message()
            await socket._stream.aclose()  # which trio-websocket 0.12 leaves to the collector where the server has closed
    assert (closed.value.reason.code, closed.value.reason.reason) == (1011, "the part said fail")
