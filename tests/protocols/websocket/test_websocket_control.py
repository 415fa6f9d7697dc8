"""Control frames by wsproto's connections: which serve again, and what is left of those that do not."""

from __future__ import annotations

import gc

import pytest
from wsproto import frame_protocol

from protocols.roles import Role
from protocols.websocket.control import Control, Violation


@pytest.mark.parametrize("role", Role)
def test_control_frames_leave_nothing_for_the_garbage_collector(role: Role) -> None:
    def library_objects() -> int:
        return sum(type(one) is frame_protocol.FrameProtocol for one in gc.get_objects())

    control, flag, key = Control(role), 0x80 if role is Role.SERVER else 0, bytes(4) if role is Role.SERVER else b""
    frames = [
        bytes((first, flag | len(rest))) + key + rest for first in (0x88, 0x89, 0x8A) for rest in (b"", b"\x03\xe8late")
    ]
    wrong = [bytes((0x88, flag | 1)) + key + b"?", bytes((0x89, flag ^ 0x80)), b"\xb9\x00"]
    gc.collect()
    gc.disable()
    try:
        before = library_objects()
        for frame in frames:
            for end in range(2, len(frame)):
                assert control.read(frame[:end]) is None
            event = control.read(frame)
            assert event is not None
            control.write(event)
        for frame in wrong:
            with pytest.raises(Violation):
                control.read(frame)
        assert library_objects() <= before + 1
    finally:
        gc.enable()
