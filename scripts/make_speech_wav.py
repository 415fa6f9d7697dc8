"""Makes the speech example: phrases spoken by espeak-ng, silences and noise, and where the phrases are.

    apt-get install espeak-ng
    python scripts/make_speech_wav.py

Writes speech.wav (16 kHz mono PCM16) and speech.json into models/library/data. The boundaries are computed on the
clean speech, before the noise is added. One version of espeak-ng gives the same files each time.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import wave
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Samples: TypeAlias = npt.NDArray[np.float64]

DATA = Path(__file__).parents[1] / "models" / "library" / "data"
RATE = 16_000
PHRASES = (  # silence before, in seconds, and what is said
    (0.9, "One model, every wire."),
    (0.5, "The window is the model."),
    (1.1, "How are you today?"),
    (0.7, "Goodbye."),
)
SILENCE_AFTER = 0.8
PEAK = 0.5
NOISE_DBFS = -62.0
LOUD_NOISE_DBFS = -46.0
LOUD_FROM_PHRASE, LOUD_TO_PHRASE = 2, 3
"""The louder noise begins in the middle of the silence before the one and ends in that before the other."""
AUDIBLE_DB = 30.0
"""A phrase begins and ends where 10 ms of it are at most this far below the loudest 10 ms."""


def speak(text: str) -> Samples:
    """The spoken text at 16 kHz, its largest sample at PEAK."""
    command = ["espeak-ng", "-v", "en-us", "-s", "150", "--stdout", text]
    wav = bytearray(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    wav[40:44] = (len(wav) - 44).to_bytes(4, "little")  # a pipe's header does not know the length
    with wave.open(io.BytesIO(wav)) as file:
        rate = file.getframerate()
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2").astype(np.float64)
    speech = resample(samples, rate)
    return speech * float(PEAK / np.max(np.abs(speech)))


def resample(samples: Samples, rate: int) -> Samples:
    """Band-limited: the spectrum without what the new rate cannot carry."""
    size = len(samples) * RATE // rate
    spectrum = np.fft.rfft(samples)[: size // 2 + 1]
    resampled: Samples = np.fft.irfft(spectrum, size) * (size / len(samples))
    return resampled


def audible(samples: Samples) -> tuple[int, int]:
    """The first sample of the speech and the one behind its last."""
    frame = RATE // 100
    power = (samples[: len(samples) // frame * frame].reshape(-1, frame) ** 2).mean(axis=1)
    loud = np.flatnonzero(power >= np.max(power) / 10 ** (AUDIBLE_DB / 10))
    return int(loud[0]) * frame, int(loud[-1] + 1) * frame


def main() -> None:
    clean: list[Samples] = []
    phrases: list[dict[str, object]] = []
    middles: list[int] = []
    position = 0
    for silence, text in PHRASES:
        samples = speak(text)
        first, end = audible(samples)
        middles.append(position + int(silence * RATE / 2))
        clean += [np.zeros(int(silence * RATE)), samples[first:end]]
        start = position + int(silence * RATE)
        position = start + end - first
        phrases.append({"text": text, "start": start / RATE, "end": position / RATE})
    clean.append(np.zeros(int(SILENCE_AFTER * RATE)))
    speech = np.concatenate(clean)

    noise_db = np.full(len(speech), NOISE_DBFS)
    loud_from, loud_to = middles[LOUD_FROM_PHRASE], middles[LOUD_TO_PHRASE]
    noise_db[loud_from:loud_to] = LOUD_NOISE_DBFS
    noise = np.random.Generator(np.random.PCG64(1)).standard_normal(len(speech)) * 10 ** (noise_db / 20)
    pcm = np.clip(np.rint((speech + noise) * 32768), -32768, 32767).astype("<i2")

    with wave.open(str(DATA / "speech.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(pcm.tobytes())
    about = {
        "seconds": len(pcm) / RATE,
        "phrases": phrases,
        "noise_dbfs": NOISE_DBFS,
        "louder_noise": {"dbfs": LOUD_NOISE_DBFS, "start": loud_from / RATE, "end": loud_to / RATE},
    }
    (DATA / "speech.json").write_text(json.dumps(about, indent=2) + "\n")
    json.dump(about, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
