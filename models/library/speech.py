"""Finds speech in audio as it arrives: energy over an adaptive noise floor, with hysteresis."""

from __future__ import annotations

import json
import math
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt
import trio

from models.errors import ModelError
from models.messages import Part, PartKind
from models.session import Session

Samples: TypeAlias = npt.NDArray[np.int16]

RATE = 16_000
FRAME = 320
"""Samples in a frame: 20 ms, the usual time in which speech is considered stationary."""
FRAME_SECONDS = FRAME / RATE
FULL_SCALE = 32768.0
# 2 s of audio: 100 frames, about 0.3 ms of work between two checkpoints.
_STEP = 65_536
_FMT_LIMIT = 64


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorConfig:
    """The parameters that distinguish speech from noise. Decibels are relative to the noise floor unless they are dBFS;
    times are in seconds.

    A frame `on_db` over the floor begins a segment, which is announced once it has lasted `min_speech`. It ends when no
    frame was `off_db` over the floor for `hang_over`. The floor is the lowest level of the last `floor_window`, at least
    `floor_min_dbfs` and, until a window has passed, at most `floor_start_dbfs`. If all frames of a beginning are within
    `stationary_db`, it is noise that grew louder, and becomes the floor: no voice is that even.
    """

    on_db: float = 10.0
    off_db: float = 6.0
    min_speech: float = 0.16
    hang_over: float = 0.3
    floor_window: float = 2.0
    floor_start_dbfs: float = -45.0
    floor_min_dbfs: float = -75.0
    stationary_db: float = 3.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechStart:
    """Speech began at `time`, in seconds from the first sample."""

    time: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechEnd:
    """The speech that began at `start` ended at `time`. `level_db` is its mean power in dBFS."""

    time: float
    start: float
    level_db: float

    @property
    def duration(self) -> float:
        return round(self.time - self.start, 2)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AudioEnd:
    """The input is over: its length, the time of speech in it, and the number of segments."""

    audio_seconds: float
    speech_seconds: float
    segments: int


Event: TypeAlias = SpeechStart | SpeechEnd | AudioEnd


@final
class NoiseFloor:
    """The lowest level of the last frames: speech has gaps, and a gap has only noise (minimum statistics: Martin 2001). It
    falls at once, and rises when the window has passed, or by `reset`."""

    def __init__(self, frames: int, start: float, lowest: float) -> None:
        self._frames = frames
        self._lowest = lowest
        self._minima = deque([(-1, start)])  # rising levels, so that the first is the minimum of the window

    def update(self, index: int, level: float) -> float:
        """Takes the level of the frame `index`, and returns the floor in dBFS."""
        while self._minima and self._minima[-1][1] >= level:
            self._minima.pop()
        self._minima.append((index, level))
        if self._minima[0][0] <= index - self._frames:
            self._minima.popleft()
        return max(self._lowest, self._minima[0][1])

    def reset(self, index: int, level: float) -> None:
        """Forgets earlier frames: the floor is this level now."""
        self._minima = deque([(index, level)])


@dataclass(slots=True, kw_only=True)
class _Segment:
    """Speech, or possible speech: frame numbers, power sums and the range of levels."""

    start: int
    last: int
    active: int = 0
    power: float = 0.0
    pause: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    announced: bool = False

    def extend(self, index: int, power: float, level: float) -> None:
        self.last = index
        self.active += 1
        self.power += self.pause + power
        self.pause = 0.0
        if index > self.start:  # noise may have grown in the middle of the first frame
            self.low, self.high = min(self.low, level), max(self.high, level)

    @property
    def frames(self) -> int:
        return self.last - self.start + 1

    def is_even(self, range_db: float) -> bool:
        return self.active == self.frames and self.high - self.low <= range_db


@final
class SegmentDetector:
    """A pure state machine: samples in, events out, as soon as they are certain. The events do not depend on how the audio
    is cut into pieces."""

    def __init__(self, config: DetectorConfig | None = None) -> None:
        self._config = config = config or DetectorConfig()
        self._floor = NoiseFloor(_frames(config.floor_window), config.floor_start_dbfs, config.floor_min_dbfs)
        self._min_speech = _frames(config.min_speech)
        self._hang_over = _frames(config.hang_over)
        self._rest: Samples = np.empty(0, dtype=np.int16)
        self._index = 0
        self._segment: _Segment | None = None
        self._segments = self._speech_frames = 0

    def feed(self, pcm: Samples) -> list[Event]:
        """Takes 16 kHz mono samples, any number of them."""
        samples = np.concatenate((self._rest, pcm)) if len(self._rest) else pcm
        whole = len(samples) // FRAME * FRAME
        self._rest = samples[whole:].copy()
        frames = samples[:whole].reshape(-1, FRAME).astype(np.float64)
        # The variance, so that a constant offset is silence. Both sums are whole numbers below 2**53, and so exact.
        sums = frames.sum(axis=1)
        powers = (np.einsum("ij,ij->i", frames, frames) - sums * sums / FRAME) / FRAME
        return [event for power in powers.tolist() for event in self._frame(power)]

    def finish(self) -> list[Event]:
        """Ends the input: an open segment ends, then comes AudioEnd. Call it once, last."""
        events: list[Event] = [*self._close()]
        seconds = (self._index * FRAME + len(self._rest)) / RATE
        speech = _seconds(self._speech_frames)
        events.append(AudioEnd(audio_seconds=round(seconds, 3), speech_seconds=speech, segments=self._segments))
        return events

    def _frame(self, power: float) -> list[Event]:
        index, self._index = self._index, self._index + 1
        level = _decibels(power)
        floor = self._floor.update(index, level)
        segment = self._segment
        if level >= floor + (self._config.off_db if segment else self._config.on_db):
            return self._active(index, power, level)
        if segment is not None:
            segment.pause += power
            if index - segment.last >= self._hang_over:
                return self._close()
        return []

    def _active(self, index: int, power: float, level: float) -> list[Event]:
        if self._segment is None:
            self._segment = _Segment(start=index, last=index)
        segment = self._segment
        segment.extend(index, power, level)
        if segment.announced or segment.active < self._min_speech:
            return []
        if segment.is_even(self._config.stationary_db):
            self._floor.reset(index, segment.low)
            self._segment = None
            return []
        segment.announced = True
        return [SpeechStart(time=_seconds(segment.start))]

    def _close(self) -> list[Event]:
        segment, self._segment = self._segment, None
        if segment is None or not segment.announced:
            return []
        self._segments += 1
        self._speech_frames += segment.frames
        level = round(_decibels(segment.power / segment.frames), 1)
        return [SpeechEnd(time=_seconds(segment.last + 1), start=_seconds(segment.start), level_db=level)]


@final
class PcmReader:
    """Converts bytes to samples: 16-bit little-endian, cut anywhere. A WAV header at the very start is checked and skipped.

    ModelError (status 400) names the property of the header that is not 16 kHz mono 16-bit PCM.
    """

    def __init__(self) -> None:
        self._held = bytearray()
        self._header = self._read_header()
        self._in_header = True
        self._left: int | None = None  # bytes of the WAV's data chunk that are still to come; None: all that follow

    def feed(self, data: bytes | bytearray | memoryview) -> Samples:
        """The samples that these bytes complete. Half a sample waits for its other half."""
        self._held += data
        self._in_header = self._in_header and next(self._header, False)
        if self._in_header:
            return np.empty(0, dtype=np.int16)
        size = len(self._held) if self._left is None else min(len(self._held), self._left)
        size -= size % 2
        samples = np.frombuffer(self._held[:size], dtype="<i2").astype(np.int16, copy=False)
        del self._held[:size]
        if self._left is not None:
            self._left -= size
            if self._left < 2:
                self._held.clear()  # chunks behind the audio are tags, not sound
        return samples

    def _read_header(self) -> Iterator[bool]:
        """Yields True while it needs more bytes, and ends where the samples begin."""
        held = self._held
        while b"RIFF".startswith(held[:4]) and len(held) < 12:
            yield True
        if held[:4] != b"RIFF" or held[8:12] != b"WAVE":
            return
        del held[:12]
        described = False
        while True:
            while len(held) < 8:
                yield True
            name, size = struct.unpack_from("<4sI", held)
            if name == b"data":
                break
            if name == b"fmt ":
                if not 16 <= size <= _FMT_LIMIT:
                    raise _refused("fmt chunk", f"16 to {_FMT_LIMIT} bytes", f"{size}")
                while len(held) < 8 + size:
                    yield True
                _check_format(held[8 : 8 + size])
                described = True
            skip = 8 + size + size % 2  # chunks begin at even offsets
            while len(held) < skip:
                skip -= len(held)
                held.clear()
                yield True
            del held[:skip]
        if not described:
            raise _refused("header", "a fmt chunk before the data chunk", "none")
        del held[:8]
        # A recorder that does not know the length yet writes 0 or the largest number.
        self._left = None if size in (0, 0xFFFFFFFF) else size


@final
class SpeechSegmenter:
    """Answers audio (family PARTS) with the segments of speech in it, each event while the audio still arrives.

    The parts are 16 kHz mono 16-bit little-endian PCM, cut anywhere, with or without a WAV header at the start. Other WAVs
    are refused with ModelError (status 400). Each event is one UTF8 part with one JSON object: `speech_start`, `speech_end`,
    and `end` at the end of input. No more input is taken until the events have room to be sent.
    """

    def __init__(self, config: DetectorConfig | None = None) -> None:
        self._config = config

    async def __call__(self, session: Session[Part, Part]) -> None:
        reader = PcmReader()
        detector = SegmentDetector(self._config)
        async for part in session:
            data = memoryview(part.data)
            for start in range(0, len(data), _STEP):
                for event in detector.feed(reader.feed(data[start : start + _STEP])):
                    await session.send(event_part(event))
                if len(data) > _STEP:
                    await trio.lowlevel.checkpoint()
        for event in detector.finish():
            await session.send(event_part(event))


def event_part(event: Event) -> Part:
    """An event for the client: a compact JSON object in a UTF8 part."""
    match event:
        case SpeechStart():
            value: dict[str, object] = {"event": "speech_start", "time": event.time}
        case SpeechEnd():
            value = {"event": "speech_end", "time": event.time, "start": event.start, "duration": event.duration}
            value["level_db"] = event.level_db
        case AudioEnd():
            value = {"event": "end", "audio_seconds": event.audio_seconds, "speech_seconds": event.speech_seconds}
            value["segments"] = event.segments
    return Part(data=json.dumps(value, separators=(",", ":")).encode(), kind=PartKind.UTF8)


def _check_format(fmt: bytearray) -> None:
    tag, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", fmt)
    if tag == 0xFFFE and len(fmt) >= 26:  # WAVE_FORMAT_EXTENSIBLE: the real tag is at the start of the sub-format GUID
        (tag,) = struct.unpack_from("<H", fmt, 24)
    for field, expected, got in (
        ("format tag", 1, tag),
        ("channels", 1, channels),
        ("sample rate", RATE, rate),
        ("bits per sample", 16, bits),
    ):
        if got != expected:
            raise _refused(field, f"{expected} (the input is 16 kHz mono 16-bit PCM)", str(got))


def _refused(field: str, expected: str, got: str) -> ModelError:
    return ModelError(f"WAV {field}: expected {expected}, got {got}", code="InvalidAudio", status=400)


def _frames(seconds: float) -> int:
    return round(seconds / FRAME_SECONDS)


def _seconds(frames: int) -> float:
    return round(frames * FRAME_SECONDS, 2)


def _decibels(power: float) -> float:
    """The dBFS of a mean square; digital silence is -100."""
    return 10 * math.log10(max(power, 1e-10 * FULL_SCALE**2) / FULL_SCALE**2)
