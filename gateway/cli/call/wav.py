"""WAV files on both sides of a call: samples to send, and a file for received ones."""

from __future__ import annotations

import wave
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, final

import click

RATE = 16_000
_PIECE = RATE // 10
"""Samples per part: 100 ms, about as much as a program sends from a microphone."""


@final
class Samples:
    """The samples of a WAV file; a context manager that closes it."""

    def __init__(self, file: wave.Wave_read) -> None:
        self._file = file

    def read(self, samples: int = _PIECE) -> bytes:
        """Reads the next samples, 16-bit little-endian; -1 reads all. Empty at the end."""
        return self._file.readframes(self._file.getnframes() if samples < 0 else samples)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Samples:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_samples(path: Path) -> Samples:
    """Opens a WAV file of 16 kHz mono 16-bit PCM, the form that speech models take. UsageError for any other."""
    try:
        file = wave.open(str(path), "rb")  # noqa: SIM115  # closed by Samples
    except OSError as e:
        raise click.UsageError(f"--wav: {path} cannot be read: {e.strerror}") from None
    except (wave.Error, EOFError) as e:
        raise click.UsageError(f"--wav: {path} is no WAV of PCM: {e or 'it ends too early'}") from None
    form = (file.getframerate(), file.getnchannels(), 8 * file.getsampwidth())
    if form != (RATE, 1, 16):
        file.close()
        raise click.UsageError(
            f"--wav: expected 16000 Hz, 1 channel, 16 bits; {path} has {form[0]} Hz, {form[1]}, {form[2]}: "
            "convert it, or send it with its header by --file"
        )
    return Samples(file)


@final
class WavWriter:
    """Writes bytes as the samples of a WAV file. Bytes that begin with a RIFF header are written as they are."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._wave: wave.Wave_write | None = None
        self._begun = False

    def write(self, data: bytes) -> None:
        """Writes the next bytes. The first call must have at least four, to recognize a RIFF header."""
        if not self._begun and data:
            self._begun = True
            if data[:4] != b"RIFF":
                self._wave = wave.open(self._file, "wb")  # noqa: SIM115  # closed below
                self._wave.setparams((1, 2, RATE, 0, "NONE", ""))
        if self._wave is not None:
            self._wave.writeframesraw(data)
        else:
            self._file.write(data)

    def close(self) -> None:
        """Completes the header and closes the file."""
        if self._wave is not None:
            self._wave.close()
        self._file.close()
