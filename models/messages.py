"""The messages that models receive and send, in three families: text, tensors and opaque parts.

They are msgspec Structs, immutable and keyword-only, because one is made for each token, part and tensor: a frozen
dataclass costs ten times as much. `msgspec.structs.replace` makes a changed copy.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, cast, final

import msgspec
import numpy as np
import numpy.typing as npt


def utf8(text: str) -> bytes:
    """The text's UTF-8 bytes. A lone surrogate, which is not a character, becomes U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


Parameter: TypeAlias = str | int | float | bool


_EMPTY: Mapping[Any, Any] = MappingProxyType({})


class Family(enum.Enum):
    """The kind of messages of a model."""

    TEXT = "text"
    """Prompt in; any number of Tokens and one Finish out."""
    TENSOR = "tensor"
    """InferRequest in, InferResponse out."""
    PARTS = "parts"
    """Part in, Part out."""


class FinishReason(enum.Enum):
    """The reason why a generation ended."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"


@final
class GenerationParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a generation: all of the LMI tables (common, vLLM, lmi-dist, TensorRT-LLM) and of OpenAI's. The
    defaults leave the model's own distribution unchanged. `extra` has all other parameters, unchanged.

    A model acts on those that it supports, and may declare them (`ModelSpec.parameters`).
    """

    do_sample: bool = False
    """False: the most probable token is chosen, whatever the sampling parameters are."""
    seed: int | None = None
    """None: the model chooses one. The same seed gives the same text."""
    temperature: float = 1.0
    """0 is greedy."""
    repetition_penalty: float = 1.0
    """Divides the scores of tokens in the prompt or the output. Above 1 it makes them rarer."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    """Tokens with less than this share of the highest probability are left out."""
    typical_p: float = 1.0
    """The mass of the most typical tokens that are kept (Meister and others 2022). 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted from the score of each token that is in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's score once for each time that it is in the output."""
    logit_bias: Mapping[int, float] = _EMPTY
    """Added to the scores of these tokens."""
    max_new_tokens: int = 30
    """The most tokens, including the end-of-sequence token. The gateway ends the text there. 0: only the prompt is taken in,
    and reported if that is asked for."""
    limited: bool = True
    """False if the request names no `max_new_tokens`: then it is a default, and the model may choose a smaller number."""
    min_length: int = 0
    """The end-of-sequence token is not chosen before this many tokens."""
    ignore_eos_token: bool = False
    """True: the end-of-sequence token is never chosen."""
    stop_sequences: tuple[str, ...] = ()
    """The gateway ends the text at them, unless the model declares that it ends them itself (`ModelSpec.parameters`)."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = True
    """True if a text that ends with a stop sequence includes it."""
    bad_sequences: tuple[str, ...] = ()
    """Texts that must not be generated."""
    n: int = 1
    """The number of sequences to return; `Token.sequence` distinguishes them. If they are chosen from more, by `best_of` or
    `num_beams`, 0 is the best."""
    best_of: int = 1
    """The number of sequences to generate and choose from; never less than `n`."""
    num_beams: int = 1
    """Above 1: beam search of that width, which is deterministic and ignores `best_of`."""
    length_penalty: float = 1.0
    """For beams: the exponent of the length that divides their log-probability."""
    early_stopping: bool = False
    """For beams: True ends the search as soon as `num_beams` are complete."""
    truncate: int | None = None
    """The most tokens of the prompt; the last ones are kept."""
    skip_special_tokens: bool = True
    """True: special tokens have no text."""
    spaces_between_special_tokens: bool = True
    details: bool = False
    return_full_text: bool = False
    decoder_input_details: bool = False
    """True if the prompt's tokens must be sent first, as `Token(prefill=True)`."""
    top_n_tokens: int = 0
    """The number of most probable tokens of each step to send with its token, as `Token.top`."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    extra: Mapping[str, Any] = _EMPTY


@final
class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A text to continue."""

    text: str
    parameters: GenerationParameters = GenerationParameters()


@final
class TopToken(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One of the most probable tokens of a step, chosen or not."""

    text: str
    id: int = 0
    log_prob: float | None = 0.0
    special: bool = False
    data: bytes = b""
    """The token's bytes, if they are not `text` in UTF-8."""


@final
class Token(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One generated token. `text` is its addition to the output, which may be empty. `log_prob` is natural, at most 0.

    `prefill` marks a token of the prompt, sent if `decoder_input_details` asks for it; its `log_prob` is None for the first.
    `special` marks a token without its own text (end of sequence): its `text` is empty, except for text that was held back
    before it, and if special tokens are shown. `finish` on the last token is the reason of the end; a model that learns the
    reason only afterwards sends Finish. `top` has the most probable tokens of its step, the best first, if `top_n_tokens`
    asks for them. `sequence` is the number of its continuation (`n`). `prompt_tokens`, on any token, is the number of the
    prompt's tokens, for wires that report it; a model that is called with a session may set it there. `stop` is the stop
    sequence that ended the text, if `finish` is that reason.

    `data` are the token's own bytes, for tokens that `text` cannot express: a character of UTF-8 has up to four bytes, and a
    token may have only some of them. The gateway decodes them for each sequence, shows a character with the token that
    completes it, and ignores the `text` of a token with `data`. If a model's `parameters` have `stop_sequences`, it ends its
    texts itself: its `text` is shown, and its `data` are reported with log-probabilities.
    """

    text: str
    id: int = 0
    log_prob: float | None = 0.0
    special: bool = False
    prefill: bool = False
    finish: FinishReason | None = None
    top: tuple[TopToken, ...] = ()
    sequence: int = 0
    prompt_tokens: int | None = None
    stop: str = ""
    data: bytes = b""


@final
class Finish(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The generation, or one `sequence` of it, is complete. It is optional: without it, a model that returns has finished
    with LENGTH after `max_new_tokens` tokens, and with EOS_TOKEN otherwise. `prompt_tokens` and `stop` are as on a token."""

    reason: FinishReason
    sequence: int = 0
    prompt_tokens: int | None = None
    stop: str = ""


class Tensor(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A named array. `datatype` is the v2 name (BOOL, UINT8 ... FP64, BF16, BYTES) and determines the type of `data`.

    If it came from a wire, `data` is a read-only view of the received bytes: copy before writing. BF16 is
    `ml_dtypes.bfloat16`, BYTES an object array of `bytes`. A sent tensor must not change until `send` has returned and the
    reply is written.

    `whole` is set if `data` are only some rows of a tensor that arrives in pieces: it is the full shape.
    """

    name: str
    data: npt.NDArray[Any]
    datatype: str = ""
    parameters: Mapping[str, Parameter] = _EMPTY
    whole: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.datatype:
            try:
                datatype = datatype_of(self.data.dtype)
            except TypeError as e:
                raise TypeError(f"tensor {str(self.name)[:60]!r}: {e}") from None
            msgspec.structs.force_setattr(self, "datatype", datatype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape


class Elements(Protocol):
    """A stand-in for an array of BYTES whose elements have not been used."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def size(self) -> int: ...
    @property
    def data(self) -> memoryview:
        """The received bytes, including the lengths."""

    @property
    def made(self) -> bool:
        """True if the array exists already."""

    def array(self) -> npt.NDArray[Any]:
        """The read-only object array of `bytes`, the same one at each call."""

    def fill(self, flat: npt.NDArray[Any]) -> Iterator[None]:
        """Makes the elements in `flat`, an object array of `size`, in steps of a few milliseconds. They are not kept."""


_given: Any = vars(Tensor)["data"]


@final
class BytesTensor(Tensor, frozen=True, kw_only=True, eq=False):
    """A Tensor of BYTES from a wire: its elements become objects when `data` is first used. If a model passes it on unused,
    the received bytes are sent."""

    @classmethod
    def of(cls, name: str, elements: Elements, parameters: Mapping[str, Parameter] = _EMPTY) -> BytesTensor:
        return cls(name=name, data=cast("npt.NDArray[Any]", elements), datatype="BYTES", parameters=parameters)

    @property  # type: ignore[misc]  # overrides the parent's member, which holds what was given
    def data(self) -> npt.NDArray[Any]:
        given = self.given
        return given if isinstance(given, np.ndarray) else given.array()

    @property
    def given(self) -> npt.NDArray[Any] | Elements:
        """The source of `data`. Reading it makes no objects."""
        given: npt.NDArray[Any] | Elements = _given.__get__(self)
        return given

    @property
    def shape(self) -> tuple[int, ...]:
        return self.given.shape


_DATATYPES = {
    "b1": "BOOL", "u1": "UINT8", "u2": "UINT16", "u4": "UINT32", "u8": "UINT64",
    "i1": "INT8", "i2": "INT16", "i4": "INT32", "i8": "INT64", "f2": "FP16", "f4": "FP32", "f8": "FP64",
}  # fmt: skip

DATATYPES = (*_DATATYPES.values(), "BF16", "BYTES")
"""The names of all datatypes of v2."""


def datatype_of(dtype: np.dtype[Any]) -> str:
    """The v2 name of a numpy dtype. TypeError for one that v2 cannot carry (complex, datetime, structured)."""
    if name := _DATATYPES.get(f"{dtype.kind}{dtype.itemsize}"):
        return name
    if dtype.kind in "OSUT":  # T is numpy's StringDType
        return "BYTES"
    if dtype.name == "bfloat16":
        return "BF16"
    if dtype.name.startswith("float"):
        raise TypeError(
            f"no v2 datatype for numpy dtype {dtype}: v2 has FP16, BF16, FP32 and FP64, and none of 8 bits or fewer; "
            "cast to one of these, or give the bytes with .view(numpy.uint8)"
        )
    raise TypeError(f"no v2 datatype for numpy dtype {dtype}: cast to a bool, integer, float, bfloat16 or bytes array")


@final
class InferRequest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One inference: inputs in the order sent, and the names of the requested outputs (empty: all).

    `last` is False if more pieces of this request follow, for a model that asked for pieces. `parameters` are the client's,
    including Triton's `sequence_id`, `sequence_start`, `sequence_end`, `priority` and `timeout`, if it sent them.
    """

    inputs: Sequence[Tensor]
    id: str = ""
    parameters: Mapping[str, Parameter] = _EMPTY
    outputs: Sequence[str] = ()
    last: bool = True

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        for tensor in self.inputs:
            if tensor.name == name:
                return tensor.data
        raise KeyError(f"no input {name!r}; there are: {', '.join(t.name for t in self.inputs)}")


@final
class InferResponse(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The outputs of one inference. If `id` is empty, the request's is used."""

    outputs: Sequence[Tensor]
    id: str = ""
    parameters: Mapping[str, Parameter] = _EMPTY


class PartKind(enum.Enum):
    """The declared type of a part's bytes. The bytes are not checked against it: UTF8 may be invalid."""

    UTF8 = "UTF8"
    BINARY = "BINARY"

    __hash__ = object.__hash__  # Enum's own hash is a Python call, and the kind of each part is looked up


@final
class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A fragment of a message of bytes: one event on BiDi, one frame on WebSocket, never merged and never split.

    `last` is False if further parts continue this fragment (CompletionState PARTIAL, FIN clear).
    """

    data: bytes | bytearray | memoryview
    kind: PartKind = PartKind.BINARY
    last: bool = True


Inbound: TypeAlias = Prompt | InferRequest | Part
Outbound: TypeAlias = Token | Finish | InferResponse | Part
Message: TypeAlias = Inbound | Outbound
