"""Prints and keeps the answer of a call, item by item."""

from __future__ import annotations

import base64
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gateway.cli.call.wav import WavWriter
from protocols import v2

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
"""Characters of a tensor's name that a file's name must not have: the server chose them."""
_OF_TEXT = frozenset((".txt", ".json", ".jsonl", ".ndjson", ".csv", ".md", ".html", ".xml", ".srt", ".vtt"))
_OF_BYTES = frozenset((".wav", ".pcm", ".raw", ".bin", ".mp3", ".flac", ".ogg", ".opus"))


@final
class Report:
    """Reports one call. `write` takes text for stdout, to be written at once; `complain` takes a line for stderr.

    If `out` is given, items of one kind go to that file: `.npy` is for tensors, `.wav` and other names of audio are for the
    bytes of parts, `.txt`, `.json` and other names of text are for texts, and any other name is for the kind of the first
    part. Items of the other kind are printed. If the wire does not tell the kind, all go to the file. The first makes it.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        complain: Callable[[str], None],
        *,
        as_json: bool = False,
        out: Path | None = None,
    ) -> None:
        self._write, self._complain, self._json, self._out = write, complain, as_json, out
        self._began = time.perf_counter()
        self._first: float | None = None
        self._midline = False
        self._file: Any = None
        self._replies = 0
        suffix = "" if out is None else out.suffix.lower()
        self._texts = True if suffix in _OF_TEXT else False if suffix in _OF_BYTES else None  # None: not known yet
        self._kept = self._printed = False  # if an item was
        self.status: int | None = None
        self.grpc_status: int | None = None
        self.received = 0

    def head(self, status: int) -> None:
        """Reports the head of the answer, once."""
        if self.status is None:
            self.status = status
            if self._json:
                self._event("head", status=status)

    def token(self, text: str) -> None:
        """Reports the text of a token."""
        self._item()
        if self._json:
            self._event("token", text=text)
        if self._is_kept(True):
            self._keep(text.encode())
        elif not self._json:
            self._print(text)

    def part(self, data: bytes, *, line: bool, text: bool | None = None) -> None:
        """Reports the bytes of a part. `line`: the part is printed on its own line. `text` is what the wire says of it."""
        self._item()
        kept, shown = self._is_kept(text), _text_of(data)
        if self._json:
            said = {"text": shown} if shown is not None else {"base64": base64.b64encode(data).decode()}
            self._event("part", bytes=len(data), **({} if kept else said))
        if kept:
            self._keep(data)
        elif not self._json:
            if shown is None:
                self._line(f"({len(data)} bytes that are no text; --out FILE.bin keeps them)")
            elif line:
                self._line(shown)
            else:
                self._print(shown)

    def document(self, document: dict[str, Any]) -> None:
        """Reports a reply of v2's generate."""
        if isinstance(text := document.get("text_output"), str):
            self.token(text)
            return
        self.part(json.dumps(document, ensure_ascii=False).encode(), line=True)

    def tensors(self, answer: v2.V2Answer) -> None:
        """Reports a reply with tensors."""
        self._item()
        self._replies += 1
        for tensor in answer.outputs:
            array = tensor.elements
            shape = list(array.shape)
            saved = self._save(tensor.name, array, len(answer.outputs)) if self._out is not None else None
            if self._json:
                kept = {"file": str(saved)} if saved is not None else {"data": _plain(array)}
                self._event("tensor", name=tensor.name, datatype=tensor.datatype, shape=shape, **kept)
            elif saved is not None:
                self._line(f"{tensor.name} {tensor.datatype} {shape} in {saved}")
            else:
                self._line(f"{tensor.name} {tensor.datatype} {shape}")
                self._line(np.array2string(array, threshold=100))

    def end(self, ending: str, code: int, error: str = "") -> int:
        """Reports the end of the call and returns `code`. An error goes to stderr too."""
        self.close()
        if self._midline:
            self._print("\n")
        if self._printed and not self._kept:
            kind = "text" if self._texts else "bytes"
            self._complain(f"{self._out} is not written: no part of the answer is {kind}, which that name is for")
        if self._json:
            at = time.perf_counter()
            self._event(
                "end",
                status=self.status,
                **({} if self.grpc_status is None else {"grpc_status": self.grpc_status}),
                ending=ending,
                first_ms=None if self._first is None else _ms(self._first - self._began),
                total_ms=_ms(at - self._began),
                bytes=self.received,
                **({"error": error} if error else {}),
            )
        if error:
            self._complain(error)
        return code

    def close(self) -> None:
        """Completes the file, however the call ended."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _item(self) -> None:
        if self._first is None:
            self._first = time.perf_counter()

    def _event(self, event: str, **members: Any) -> None:
        self._write(json.dumps({"event": event, **members}, ensure_ascii=False, allow_nan=False) + "\n")

    def _print(self, text: str) -> None:
        if text:
            self._write(text)
            self._midline = not text.endswith("\n")

    def _line(self, text: str) -> None:
        self._print(text if text.endswith("\n") else text + "\n")

    def _is_kept(self, text: bool | None) -> bool:
        """True if an item goes to the file."""
        if self._out is None:
            return False
        if self._texts is None:
            self._texts = text
        kept = text is None or text == self._texts
        self._kept |= kept
        self._printed |= not kept
        return kept

    def _keep(self, data: bytes) -> None:
        assert self._out is not None
        if self._file is None:
            file = self._out.open("wb")
            self._file = WavWriter(file) if self._out.suffix.lower() == ".wav" else file
        self._file.write(data)

    def _save(self, name: str, array: npt.NDArray[Any], outputs: int) -> Path:
        """Saves one array in one file. With several outputs, the file's name has the output's name; from the second reply
        on, it has the reply's number."""
        assert self._out is not None
        stem = self._out.stem + (f".{_UNSAFE.sub('_', name)}" if outputs > 1 else "")
        stem += f".{self._replies}" if self._replies > 1 else ""
        path = self._out.with_name(f"{stem}.npy")
        with path.open("wb") as file:
            np.save(file, array.astype("S") if array.dtype.kind == "O" else array, allow_pickle=False)
        return path


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _text_of(data: bytes) -> str | None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return None if "\x00" in text else text


def _plain(array: npt.NDArray[Any]) -> Any:
    """The array as nested lists that JSON can hold. Numbers that are not finite become the strings nan, inf and -inf."""
    if array.dtype == ml_dtypes.bfloat16:
        array = array.astype(np.float32)
    return _jsonable(array.tolist())


def _jsonable(value: Any) -> Any:
    if isinstance(value, list):
        return [_jsonable(item) for item in value]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
