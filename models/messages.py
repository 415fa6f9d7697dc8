"""What models receive and send, in three families: text, tensors and opaque parts.

They are msgspec Structs, immutable and keyword-only, which cost a tenth of a frozen dataclass to make: one is made for
each token, part and tensor. `msgspec.structs.replace` gives a changed copy.
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
    """The text's UTF-8 bytes; half of a surrogate pair, which is no character, becomes U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


Parameter: TypeAlias = str | int | float | bool


_EMPTY: Mapping[Any, Any] = MappingProxyType({})


class Family(enum.Enum):
    """Which messages a model speaks."""

    TEXT = "text"
    """Prompt in; Token ... and one Finish out."""
    TENSOR = "tensor"
    """InferRequest in, InferResponse out."""
    PARTS = "parts"
    """Part in, Part out."""


class FinishReason(enum.Enum):
    """Why a generation ended."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"


@final
class GenerationParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How to generate: every parameter of the LMI tables (common, vLLM, lmi-dist, TensorRT-LLM) and of OpenAI's, with
    defaults that leave the model's own distribution alone, and `extra` for whatever the tables do not know, as it came.

    A model acts on those it supports, and may say which (`ModelSpec.parameters`).
    """

    do_sample: bool = False
    """False: the most probable token, whatever the parameters of sampling say."""
    seed: int | None = None
    """None: choose one. The same seed gives the same text."""
    temperature: float = 1.0
    """0 is greedy."""
    repetition_penalty: float = 1.0
    """Divides the scores of tokens that are in the prompt or the output; above 1 makes them rarer."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    """Tokens less probable than this share of the most probable one are left out."""
    typical_p: float = 1.0
    """The mass of the most typical tokens that are kept (Meister and others 2022); 1 is off."""
    presence_penalty: float = 0.0
    """Taken from the score of each token that is in the output."""
    frequency_penalty: float = 0.0
    """The same, once for each time that it is there."""
    logit_bias: Mapping[int, float] = _EMPTY
    """Added to the scores of these tokens."""
    max_new_tokens: int = 30
    """It counts the end-of-sequence token too. The gateway ends the text there."""
    min_length: int = 0
    """The end-of-sequence token is not chosen before so many tokens."""
    ignore_eos_token: bool = False
    """It is never chosen."""
    stop_sequences: tuple[str, ...] = ()
    """The gateway ends the text at them, of a model that does not say that it does (`ModelSpec.parameters`)."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = True
    """Whether a text that ends by a stop sequence includes it."""
    bad_sequences: tuple[str, ...] = ()
    """Texts that must not be generated."""
    n: int = 1
    """How many sequences come back: `Token.sequence` tells them apart. Of those that were chosen from more, by `best_of` or
    `num_beams`, 0 is the best."""
    best_of: int = 1
    """How many are generated to choose them from; never less than `n`."""
    num_beams: int = 1
    """Above 1: beam search of that width, which is deterministic and has no use for `best_of`."""
    length_penalty: float = 1.0
    """Of beams: the exponent of the length that divides their log-probability."""
    early_stopping: bool = False
    """Of beams: the search ends as soon as `num_beams` are complete."""
    truncate: int | None = None
    """At most so many tokens of the prompt, the last ones."""
    skip_special_tokens: bool = True
    """Special tokens have no text."""
    spaces_between_special_tokens: bool = True
    details: bool = False
    return_full_text: bool = False
    decoder_input_details: bool = False
    """The prompt's tokens are to be sent first, as `Token(prefill=True)`."""
    top_n_tokens: int = 0
    """How many of the most probable tokens of each step are to come with its token, as `Token.top`."""
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
    """One of the most probable tokens of a step, whether it was chosen or not."""

    text: str
    id: int = 0
    log_prob: float | None = 0.0
    special: bool = False
    data: bytes = b""
    """The token's bytes, if they are not `text` in UTF-8."""


@final
class Token(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One generated token: `text` is what it adds to the output (possibly nothing), `log_prob` natural, at most 0.

    `prefill` marks a token of the prompt, reported when `decoder_input_details` asks for it; its `log_prob` is None
    for the first. `special` marks one that is not text itself (end of sequence): its `text` is empty but for what was
    held back before it, or where special tokens are to be shown. `finish` on the last token says why it is the last; a
    model that knows it only afterwards sends Finish. `top` are the most probable tokens of its step, the best first,
    where `top_n_tokens` asks for them. `sequence` is which of several continuations it belongs to (`n`). `prompt_tokens`, on
    any of its tokens, is how many the prompt has, for the wires that tell their clients: a model that is called with a
    session may say it there. `stop` is the stop sequence that has ended the text, where `finish` says that one has.

    `data` are the token's own bytes, for tokens that `text` cannot say: a character of UTF-8 has up to four bytes, and a
    token may have some of them. The gateway decodes them for each sequence and shows a character with the token that
    finishes it; `text` of a token with `data` is then not looked at. A model whose `parameters` have `stop_sequences` ends
    its texts itself: its `text` is what is shown, and its `data` what log-probabilities report.
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
    """The generation is complete, or one `sequence` of it. Optional: a model that just returns has finished with LENGTH
    if it produced `max_new_tokens` tokens and EOS_TOKEN otherwise. `prompt_tokens` and `stop` as a token's."""

    reason: FinishReason
    sequence: int = 0
    prompt_tokens: int | None = None
    stop: str = ""


class Tensor(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A named array. `datatype` is the v2 name (BOOL, UINT8 ... FP64, BF16, BYTES) and decides what `data` holds.

    `data` is a read-only view of the bytes received where it came from a wire: copy before writing. BF16 is
    `ml_dtypes.bfloat16`, BYTES an object array of `bytes`. A tensor that is sent must not change until `send` has
    returned and the reply is written.

    `whole` is set where `data` are only some rows of a tensor that arrives in pieces: the shape of all of it.
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
    """What stands for an array of BYTES that nobody has looked at."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def size(self) -> int: ...
    @property
    def data(self) -> memoryview:
        """The bytes that came, lengths included."""

    @property
    def made(self) -> bool:
        """True if there is an array already."""

    def array(self) -> npt.NDArray[Any]:
        """The read-only object array of `bytes`, the same one at each call."""

    def fill(self, flat: npt.NDArray[Any]) -> Iterator[None]:
        """Makes the elements, in an object array of `size`, in steps of a few milliseconds; they are not kept."""


_given: Any = vars(Tensor)["data"]


@final
class BytesTensor(Tensor, frozen=True, kw_only=True, eq=False):
    """A Tensor of BYTES as it came from a wire: its elements become objects when `data` is first looked at. One that a
    model hands on without a look leaves as the bytes that came."""

    @classmethod
    def of(cls, name: str, elements: Elements, parameters: Mapping[str, Parameter] = _EMPTY) -> BytesTensor:
        return cls(name=name, data=cast("npt.NDArray[Any]", elements), datatype="BYTES", parameters=parameters)

    @property  # type: ignore[misc]  # over the parent's member, which holds what was given
    def data(self) -> npt.NDArray[Any]:
        given = self.given
        return given if isinstance(given, np.ndarray) else given.array()

    @property
    def given(self) -> npt.NDArray[Any] | Elements:
        """What `data` is made of: that it is asked for makes no objects."""
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
    """The v2 name of a numpy dtype; TypeError for one that v2 cannot carry (complex, datetime, structured)."""
    if name := _DATATYPES.get(f"{dtype.kind}{dtype.itemsize}"):
        return name
    if dtype.kind in "OSU":
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
    """One inference: inputs in the order sent, and the names of the outputs asked for (empty: all).

    `last` False: more pieces of this request follow, to a model that asked for pieces. `parameters` are the client's;
    Triton's `sequence_id`, `sequence_start`, `sequence_end`, `priority` and `timeout` are among them where it sent them.
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
    """The outputs of one inference. `id` is filled in from the request where it is empty."""

    outputs: Sequence[Tensor]
    id: str = ""
    parameters: Mapping[str, Parameter] = _EMPTY


class PartKind(enum.Enum):
    """What the bytes of a part claim to be. Nobody inspects them: UTF8 may be invalid."""

    UTF8 = "UTF8"
    BINARY = "BINARY"

    __hash__ = object.__hash__  # Enum's own is a call of Python's, and each part's kind is looked up


@final
class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A fragment of a message of bytes: one event on BiDi, one frame on WebSocket, never merged and never split.

    `last` is False for a fragment that further parts continue (CompletionState PARTIAL, FIN clear).
    """

    data: bytes | bytearray | memoryview
    kind: PartKind = PartKind.BINARY
    last: bool = True


Inbound: TypeAlias = Prompt | InferRequest | Part
Outbound: TypeAlias = Token | Finish | InferResponse | Part
Message: TypeAlias = Inbound | Outbound
