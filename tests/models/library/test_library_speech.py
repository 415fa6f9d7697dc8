"""The speech segmenter: real speech in noise, every split, WAV headers, and when events are sent."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import models.library
from models.errors import ModelError
from models.library.speech import (
    FRAME,
    RATE,
    AudioEnd,
    DetectorConfig,
    Event,
    PcmReader,
    SegmentDetector,
    SpeechEnd,
    SpeechSegmenter,
    SpeechStart,
    event_part,
)
from models.messages import Part, PartKind
from models.session import Session
from tests.models.library.library_session import Tape, converse, stalled

DATA = Path(models.library.__file__).parent / "data"
WAV = (DATA / "speech.wav").read_bytes()
ABOUT: dict[str, Any] = json.loads((DATA / "speech.json").read_text())
PCM = np.frombuffer(WAV[44:], dtype="<i2").astype(np.int16)
TOLERANCE = 0.15


def detect(*pieces: np.ndarray[Any, Any], config: DetectorConfig | None = None) -> list[Event]:
    detector = SegmentDetector(config)
    return [event for piece in pieces for event in detector.feed(piece)] + detector.finish()


def noise(seconds: float, dbfs: float, seed: int = 0) -> np.ndarray[Any, Any]:
    samples = np.random.Generator(np.random.PCG64(seed)).standard_normal(round(seconds * RATE))
    return (samples * 32768 * 10 ** (dbfs / 20)).astype(np.int16)


def voice(seconds: float, dbfs: float) -> np.ndarray[Any, Any]:
    """Syllables: a tone whose strength rises and falls eight times a second."""
    time = np.arange(round(seconds * RATE)) / RATE
    return (np.sin(1000 * time) * np.abs(np.sin(8 * np.pi * time)) * 65536 * 10 ** (dbfs / 20)).astype(np.int16)


def speech_of(events: list[Event]) -> list[SpeechEnd]:
    return [event for event in events if isinstance(event, SpeechEnd)]


def riff(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"".join(name + struct.pack("<I", len(data)) + data + bytes(len(data) % 2) for name, data in chunks)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


def fmt(*, tag: int = 1, channels: int = 1, rate: int = RATE, bits: int = 16) -> tuple[bytes, bytes]:
    return b"fmt ", struct.pack("<HHIIHH", tag, channels, rate, rate * channels * bits // 8, channels * bits // 8, bits)


def in_pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


# The detector


def test_each_phrase_of_the_recording_is_found_where_it_was_spoken() -> None:
    found = speech_of(detect(PCM))
    assert len(found) == len(ABOUT["phrases"])
    for segment, phrase in zip(found, ABOUT["phrases"], strict=True):
        assert abs(segment.start - phrase["start"]) <= TOLERANCE
        assert abs(segment.time - phrase["end"]) <= TOLERANCE


def test_the_summary_adds_up() -> None:
    *events, last = detect(PCM)
    segments = speech_of(events)
    assert last == AudioEnd(
        audio_seconds=ABOUT["seconds"],
        speech_seconds=round(sum(segment.duration for segment in segments), 2),
        segments=len(segments),
    )


@settings(max_examples=25)
@given(st.lists(st.integers(0, len(PCM)), max_size=40))
def test_however_the_audio_is_cut_the_events_are_the_same(cuts: list[int]) -> None:
    assert detect(*np.split(PCM, sorted(cuts))) == detect(PCM)


def test_one_sample_at_a_time_gives_the_same_events() -> None:
    part = PCM[RATE // 2 : 2 * RATE]
    assert detect(*np.split(part, len(part))) == detect(part)


def test_silence_and_steady_noise_are_no_speech() -> None:
    for audio in (np.zeros(3 * RATE, dtype=np.int16), noise(3, -60), noise(3, -25), np.full(3 * RATE, 9000, dtype=np.int16)):
        assert detect(audio) == [AudioEnd(audio_seconds=3.0, speech_seconds=0.0, segments=0)]


def test_noise_that_grows_louder_becomes_the_floor_and_speech_above_it_is_found() -> None:
    audio = np.concatenate((noise(2, -60), noise(1, -40), noise(1, -40, 1) + voice(1, -18), noise(1, -40, 2)))
    (segment,) = speech_of(detect(audio))
    assert segment.start == pytest.approx(3, abs=TOLERANCE)
    assert segment.time == pytest.approx(4, abs=TOLERANCE)


def test_a_pause_shorter_than_the_hang_over_does_not_end_a_segment() -> None:
    def with_pause(seconds: float) -> int:
        return len(speech_of(detect(np.concatenate((noise(1, -60), voice(1, -20), noise(seconds, -60), voice(1, -20))))))

    assert with_pause(0.2) == 1
    assert with_pause(0.4) == 2


def test_a_sound_shorter_than_the_minimum_is_not_announced() -> None:
    def with_sound(frames: int) -> list[Event]:
        sound = voice(1, -20)[: frames * FRAME]
        return detect(np.concatenate((np.zeros(RATE, dtype=np.int16), sound, np.zeros(RATE, dtype=np.int16))))

    config = DetectorConfig()
    enough = round(config.min_speech * RATE / FRAME)
    assert with_sound(enough - 1)[:-1] == []
    assert with_sound(enough)[0] == SpeechStart(time=1.0)


def test_the_end_of_the_audio_ends_an_open_segment() -> None:
    start, end, last = detect(np.concatenate((noise(1, -60), voice(1, -20))))
    assert isinstance(start, SpeechStart)
    assert isinstance(end, SpeechEnd)
    assert end.time == pytest.approx(2, abs=0.02)
    assert end.level_db == pytest.approx(-20, abs=1)
    assert isinstance(last, AudioEnd)


def test_speech_from_the_first_sample_is_found() -> None:
    assert detect(voice(1, -20))[0] == SpeechStart(time=0.0)


# The bytes


@pytest.mark.parametrize("size", [1, 2, 3, 7, 44, 45])
def test_a_wav_header_is_skipped_however_it_is_cut(size: int) -> None:
    wav = riff((b"LIST", b"odd"), fmt(), (b"data", PCM[:500].tobytes()), (b"LIST", b"tags behind the sound"))
    reader = PcmReader()
    samples = np.concatenate([reader.feed(piece) for piece in in_pieces(wav, size)])
    assert (samples == PCM[:500]).all()


@pytest.mark.parametrize("size", [1, 3, 1001])
def test_raw_samples_survive_every_odd_cut(size: int) -> None:
    reader = PcmReader()
    pieces = [reader.feed(piece) for piece in in_pieces(PCM[:5000].tobytes(), size)]
    assert (np.concatenate(pieces) == PCM[:5000]).all()


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF])
def test_a_recorder_that_does_not_know_the_length_is_read_to_the_end(size: int) -> None:
    wav = riff(fmt()) + b"data" + struct.pack("<I", size) + PCM[:100].tobytes()
    assert len(PcmReader().feed(wav)) == 100


def test_the_extensible_form_of_the_header_is_understood() -> None:
    name, plain = fmt(tag=0xFFFE)
    extension = struct.pack("<HHIH", 22, 16, 4, 1) + bytes.fromhex("000000001000800000aa00389b71")
    assert len(PcmReader().feed(riff((name, plain + extension), (b"data", bytes(20))))) == 10


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([fmt(rate=44100)], "WAV sample rate: expected 16000 (the input is 16 kHz mono 16-bit PCM), got 44100"),
        ([fmt(channels=2)], "WAV channels: expected 1"),
        ([fmt(tag=3)], "WAV format tag: expected 1"),
        ([fmt(bits=8)], "WAV bits per sample: expected 16"),
        ([(b"fmt ", bytes(15))], "WAV fmt chunk: expected 16 to 64 bytes"),
        ([(b"fmt ", bytes(65))], "WAV fmt chunk: expected 16 to 64 bytes"),
        ([(b"data", bytes(2))], "WAV header: expected a fmt chunk before the data chunk"),
    ],
)
def test_other_wavs_are_refused_with_what_was_expected(chunks: list[tuple[bytes, bytes]], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        PcmReader().feed(riff(*chunks))
    assert caught.value.message.startswith(said)
    assert caught.value.status == 400


@settings(max_examples=100)
@given(st.lists(st.binary(max_size=40), max_size=8), st.booleans())
def test_no_bytes_raise_anything_but_a_model_error(pieces: list[bytes], with_header: bool) -> None:
    reader = PcmReader()
    with contextlib.suppress(ModelError):
        for piece in [b"RIFF\0\0\0\0WAVE", *pieces] if with_header else pieces:
            reader.feed(piece)


# The model


async def test_the_start_of_speech_is_sent_while_the_audio_still_flows() -> None:
    tape = Tape(Part(data=piece) for piece in in_pieces(WAV, 3201))
    await SpeechSegmenter()(Session(tape))
    ways = [way for way, _ in tape.log]
    taken = ways[: ways.index("out")].count("in") * 3201 / 2 / RATE
    assert taken < ABOUT["phrases"][0]["start"] + 0.5
    assert json.loads(tape.sent[0].data) == {"event": "speech_start", "time": pytest.approx(0.9, abs=TOLERANCE)}


async def test_one_large_part_gives_the_events_of_many_small_ones() -> None:
    sent = await converse(SpeechSegmenter(), Part(data=memoryview(WAV)))
    assert sent == [event_part(event) for event in detect(PCM)]
    assert {part.kind for part in sent} == {PartKind.UTF8}


async def test_the_end_event_closes_every_conversation() -> None:
    (part,) = await converse(SpeechSegmenter())
    assert part.data == b'{"event":"end","audio_seconds":0.0,"speech_seconds":0.0,"segments":0}'


def test_a_speech_end_says_where_it_began_and_how_loud_it_was() -> None:
    part = event_part(SpeechEnd(time=2.86, start=1.24, level_db=-21.3))
    assert part.data == b'{"event":"speech_end","time":2.86,"start":1.24,"duration":1.62,"level_db":-21.3}'


async def test_a_client_that_stops_reading_stops_the_segmenter_from_taking_audio() -> None:
    tape = await stalled(SpeechSegmenter(), *(Part(data=piece) for piece in in_pieces(WAV, 3200)), room=1)
    taken = sum(len(message.data) for way, message in tape.log if way == "in")
    assert len(tape.sent) == 1
    assert taken < len(WAV) / 2
