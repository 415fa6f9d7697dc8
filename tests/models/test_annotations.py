"""Declarations of arrays by annotations: datatypes, ranks, shapes, names of outputs; and what they leave open."""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, NamedTuple, NotRequired, Optional, Required, TypedDict, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import trio

from models.adapt import spec_of
from models.annotations import input_specs, output_specs
from models.messages import Family, InferRequest, InferResponse, Prompt, Tensor
from models.session import Session
from models.spec import DECLARED, Declaration, Shape, TensorSpec, declare
from tests.models.channels import MemoryChannel

Some = TypeVar("Some", bound=np.generic)
Points = Annotated[npt.NDArray[np.float32], Shape(-1, 3)]

ARRAYS: list[tuple[Any, str, tuple[int, ...] | None]] = [
    (npt.NDArray[np.float32], "FP32", None),
    (npt.NDArray[np.bool_], "BOOL", None),
    (npt.NDArray[np.uint64], "UINT64", None),
    (npt.NDArray[np.float16], "FP16", None),
    (npt.NDArray[ml_dtypes.bfloat16], "BF16", None),
    (npt.NDArray[np.object_], "BYTES", None),
    (npt.NDArray[np.bytes_], "BYTES", None),
    (npt.NDArray[np.str_], "BYTES", None),
    (np.ndarray, "", None),
    (npt.NDArray, "", None),
    (npt.NDArray[Any], "", None),
    (npt.NDArray[np.floating[Any]], "", None),
    (npt.NDArray[np.integer], "", None),
    (npt.NDArray[Some], "", None),  # type: ignore[valid-type]
    (npt.NDArray[np.float32 | np.float64], "", None),
    (np.ndarray[tuple[int, int], np.dtype[np.int8]], "INT8", (-1, -1)),
    (np.ndarray[tuple[()], np.dtype[np.int8]], "INT8", ()),
    (np.ndarray[tuple[int, ...], np.dtype[np.int8]], "INT8", None),
    (np.ndarray[tuple[Any, ...], np.dtype[np.int8]], "INT8", None),
    (np.ndarray[tuple[int], Any], "", (-1,)),
    (Points, "FP32", (-1, 3)),
    (Annotated[np.ndarray, "a note", Shape()], "", ()),
    (Annotated[np.ndarray[tuple[int], np.dtype[np.int8]], Shape(4)], "INT8", (4,)),
    (Points | None, "FP32", (-1, 3)),
    (Optional[npt.NDArray[np.int32]], "INT32", None),  # noqa: UP045  # the older form is its own in typing
]


def declared(hint: Any, *, of: Any = np.ndarray) -> TensorSpec:
    def model(x: Any) -> Any:
        return x

    model.__annotations__ = {"x": of, "return": hint}
    (output,) = spec_of(model).outputs or ()
    return output


@pytest.mark.parametrize(("hint", "datatype", "shape"), ARRAYS, ids=str)
def test_an_annotated_array_declares_its_datatype_and_its_shape(
    hint: Any, datatype: str, shape: tuple[int, ...] | None
) -> None:
    def model(x: Any) -> Any:
        return x

    model.__annotations__ = {"x": hint, "return": hint}
    spec = spec_of(model, family=Family.TENSOR)
    assert spec.inputs == (TensorSpec(name="x", datatype=datatype, shape=shape),)
    assert spec.outputs == (TensorSpec(name="OUTPUT0", datatype=datatype, shape=shape),)
    assert not spec.decoupled


@pytest.mark.skipif(sys.version_info < (3, 12), reason="has no type statement")
def test_an_alias_of_a_type_statement_is_what_it_stands_for() -> None:
    names: dict[str, Any] = {"np": np, "npt": npt, "Annotated": Annotated, "Shape": Shape}
    exec("type Row[T] = np.ndarray[tuple[int], np.dtype[T]]", names)
    exec("type Table = Annotated[npt.NDArray[np.int16], Shape(-1, 2)] | None", names)
    assert declared(names["Row"][np.int16]) == TensorSpec(name="OUTPUT0", datatype="INT16", shape=(-1,))
    assert declared(names["Row"]) == TensorSpec(name="OUTPUT0", datatype="", shape=(-1,))
    assert declared(names["Table"]) == TensorSpec(name="OUTPUT0", datatype="INT16", shape=(-1, 2))


def test_names_are_declared_also_where_nothing_is_said_of_the_arrays() -> None:
    def model(x: npt.NDArray[np.int8], y, z: object, /):  # type: ignore[no-untyped-def]
        return x

    assert spec_of(model).inputs == (
        TensorSpec(name="x", datatype="INT8", shape=None),
        TensorSpec(name="y", datatype="", shape=None),
        TensorSpec(name="z", datatype="", shape=None),
    )
    assert spec_of(model).outputs is None


def test_a_default_makes_an_array_optional_and_anything_else_no_input() -> None:
    def model(
        x: np.ndarray,
        scale: float = 1.0,
        mask: npt.NDArray[np.bool_] | None = None,
        bias: npt.NDArray[Any] = np.zeros(1),  # noqa: B008  # an array of its own for all
        *,
        keyword: np.ndarray | None = None,
    ) -> np.ndarray:
        return x

    assert spec_of(model).inputs == (
        TensorSpec(name="x", datatype="", shape=None),
        TensorSpec(name="mask", datatype="BOOL", shape=None, optional=True),
        TensorSpec(name="bias", datatype="", shape=None, optional=True),
    )


class Both(TypedDict):
    mean: Points
    words: Required[npt.NDArray[np.object_]]
    rest: list[int]


class MayMiss(TypedDict):
    mean: Points
    words: NotRequired[npt.NDArray[np.object_]]


class MayBeEmpty(TypedDict, total=False):
    mean: Points


class Pair(NamedTuple):
    low: npt.NDArray[np.float64]
    high: Any = 0


def test_a_typed_dict_or_a_named_tuple_names_the_outputs() -> None:
    def dicts(x: np.ndarray) -> Both: ...  # type: ignore[empty-body]
    def pairs(x: np.ndarray) -> Pair | None: ...

    assert spec_of(dicts).outputs == (
        TensorSpec(name="mean", datatype="FP32", shape=(-1, 3)),
        TensorSpec(name="words", datatype="BYTES", shape=None),
        TensorSpec(name="rest", datatype="", shape=None),
    )
    assert spec_of(pairs).outputs == (
        TensorSpec(name="low", datatype="FP64", shape=None),
        TensorSpec(name="high", datatype="", shape=None),
    )
    assert output_specs("model", namedtuple("Bare", "low high")) == (TensorSpec(name="low"), TensorSpec(name="high"))


@pytest.mark.parametrize(
    "hint", [MayMiss, MayBeEmpty, dict[str, np.ndarray], InferResponse, Any, None, np.ndarray | Both, object, float]
)
def test_an_answer_that_may_be_of_any_names_declares_no_outputs(hint: Any) -> None:
    assert output_specs("model", hint) is None


def test_a_number_is_an_output_without_dimensions() -> None:
    assert declared(np.float32) == TensorSpec(name="OUTPUT0", datatype="FP32", shape=())
    assert declared(np.floating[Any]) == TensorSpec(name="OUTPUT0", datatype="", shape=())


def test_one_of_several_kinds_of_arrays_is_an_array_of_which_nothing_is_said() -> None:
    def model(x: npt.NDArray[np.float32] | npt.NDArray[np.float64] | None) -> None: ...

    assert spec_of(model).inputs == (TensorSpec(name="x"),)


@pytest.mark.parametrize("hint", [tuple[np.ndarray, np.ndarray], list[np.ndarray], Iterator[np.ndarray], str, TensorSpec])
def test_an_annotation_of_what_is_no_answer_is_refused_before_a_client_meets_it(hint: Any) -> None:
    with pytest.raises(
        TypeError, match=r"^model returns \w+: a model of tensors answers with an InferResponse, an array, .*generator"
    ):
        output_specs("model", hint)


def test_an_input_that_is_annotated_as_no_array_is_refused() -> None:
    def model(x: np.ndarray, k: int) -> np.ndarray:
        return x

    with pytest.raises(
        TypeError, match=r"model: 'k' is annotated as int, and each input is a numpy array: .* or give it a def"
    ):
        spec_of(model)


def test_a_generator_whose_annotation_is_of_no_generator_leaves_its_outputs_open() -> None:
    def model(x: np.ndarray) -> np.ndarray[tuple[int], np.dtype[np.int8]]:  # type: ignore[misc]
        yield x

    assert (spec_of(model).outputs, spec_of(model).decoupled) == (None, True)


@pytest.mark.parametrize("number", [np.float32(1.5), np.int64(3), 2, 2.5, True])
async def test_a_number_is_an_answer(number: Any) -> None:
    async def model(x: np.ndarray) -> Any:
        return number

    channel = MemoryChannel(InferRequest(inputs=(Tensor(name="x", data=np.zeros(2)),)))
    async with spec_of(model).load() as loaded:
        await loaded(Session(channel))
    (output,) = channel.sent[0].outputs
    assert (output.name, output.shape, output.data) == ("OUTPUT0", (), number)


async def test_a_named_tuple_is_an_answer() -> None:
    async def model(x: np.ndarray) -> Pair:
        return Pair(low=x, high=[1])

    channel = MemoryChannel(InferRequest(inputs=(Tensor(name="x", data=np.zeros(2)),)))
    async with spec_of(model).load() as loaded:
        await loaded(Session(channel))
    assert [(t.name, t.datatype, t.shape) for t in channel.sent[0].outputs] == [
        ("low", "FP64", (2,)),
        ("high", "INT64", (1,)),
    ]


async def test_optional_arrays_have_their_defaults_where_the_client_sends_none() -> None:
    seen: list[tuple[Any, ...]] = []

    async def model(x: np.ndarray, scale: float = 2.0, mask: np.ndarray | None = None, after: int = 3) -> None:
        seen.append((x[0], scale, mask if mask is None else mask[0], after))

    def request(**arrays: int) -> InferRequest:
        return InferRequest(inputs=tuple([Tensor(name=k, data=np.array([v])) for k, v in arrays.items()]))

    async with spec_of(model).load() as loaded:
        await loaded(Session(MemoryChannel(request(x=1), request(mask=5, x=4))))
        for wrong in (request(mask=1), request(x=1, scale=2), request(x=1, mask=1, after=1)):
            with pytest.raises(Exception, match=r"expected inputs x, mask \(optional\); got ") as caught:
                await loaded(Session(MemoryChannel(wrong)))
            assert getattr(caught.value, "status", 0) == 400
    assert seen == [(1, 2.0, None, 3), (4, 2.0, 5, 3)]


def yields(x: np.ndarray) -> Iterator[npt.NDArray[np.int8]]:
    yield x


async def streams(x: np.ndarray) -> AsyncIterator[Both]:
    yield {"mean": x, "words": x, "rest": []}


async def answers(request: InferRequest) -> AsyncIterator[Any]:
    yield request


async def duplex(session: Session[InferRequest, InferResponse]) -> None: ...


def test_a_generator_is_decoupled_and_declares_what_it_yields() -> None:
    assert spec_of(yields).outputs == (TensorSpec(name="OUTPUT0", datatype="INT8", shape=None),)
    assert [t.name for t in spec_of(streams).outputs or ()] == ["mean", "words", "rest"]
    assert (spec_of(answers).inputs, spec_of(answers).outputs) == (None, None)
    assert [spec_of(m).decoupled for m in (yields, streams, answers, duplex)] == [True, True, True, False]
    assert spec_of(duplex).inputs is spec_of(duplex).outputs is None


def test_other_families_declare_nothing() -> None:
    async def words(prompt: Prompt) -> AsyncIterator[str]:
        yield prompt.text

    spec = spec_of(words)
    assert (spec.inputs, spec.outputs, spec.decoupled) == (None, None, False)


Y = TensorSpec(name="y", datatype="INT8", shape=(2,))


@declare(inputs=[Y], outputs=(), max_batch_size=2, decoupled=True)
class Declared:
    def __call__(self, x: npt.NDArray[np.float32]) -> np.ndarray:
        return x


def test_what_is_declared_wins_over_annotations_and_an_override_over_both() -> None:
    spec = spec_of(Declared())
    assert (spec.inputs, spec.outputs, spec.max_batch_size, spec.decoupled) == ((Y,), (), 2, True)
    assert spec_of(Declared(), inputs=None, max_batch_size=0).inputs is None
    assert spec_of(declare(inputs=[Y])(duplex)).inputs == (Y,)
    assert spec_of(declare(pieces=True)(answers)).pieces


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_batch": 2}, "declare has no 'max_batch'; it has: inputs, outputs, max_batch_size, decoupled, pieces"),
        ({"inputs": Y}, "declare: inputs must be a list of TensorSpecs, not TensorSpec"),
        ({"max_batch_size": "2"}, "declare: max_batch_size must be int, not str"),
        ({"pieces": 1}, "declare: pieces must be bool, not int"),
    ],
)
def test_a_declaration_that_would_be_passed_over_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        declare(**fields)


def test_a_declaration_has_the_same_names_for_mypy_and_when_it_runs() -> None:
    assert list(DECLARED) == list(Declaration.__annotations__)


@asynccontextmanager
async def loads() -> AsyncIterator[Declared]:
    yield Declared()


@asynccontextmanager
async def loads_something() -> AsyncIterator[Callable[[npt.NDArray[Any]], Awaitable[Any]]]:
    async def model(x: npt.NDArray[Any]) -> Any:
        return x

    yield model


def test_a_loader_declares_what_the_class_that_it_yields_declares() -> None:
    assert spec_of(loads).inputs == (Y,)
    assert spec_of(declare(outputs=[Y])(loads)).outputs == (Y,)
    assert spec_of(loads_something).inputs is None


def test_an_array_that_v2_cannot_carry_is_named() -> None:
    def model(x: npt.NDArray[np.complex64]) -> None: ...
    def answer(x: np.ndarray) -> npt.NDArray[np.datetime64]: ...  # type: ignore[empty-body]
    def sized(x: Annotated[np.ndarray, Shape(-2)]) -> None: ...

    with pytest.raises(TypeError, match=r"model: the annotation of 'x': no v2 datatype for numpy dtype complex64: cast to"):
        spec_of(model)
    with pytest.raises(TypeError, match=r"answer: the annotation of 'OUTPUT0': no v2 datatype for numpy dtype datetime64"):
        spec_of(answer)
    with pytest.raises(TypeError, match=r"sized: the annotation of 'x': tensor 'x': a dimension is a size, or -1 for any"):
        spec_of(sized)


def test_parameters_are_looked_at_alone() -> None:
    assert input_specs("m", [], {}) == ()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": ""}, "a tensor needs a name"),
        ({"datatype": "FLOAT"}, "tensor 'x': datatype must be one of BOOL, .*, BYTES, or empty for any, got 'FLOAT'"),
        ({"datatype": "fp32"}, "got 'fp32'"),
        ({"shape": (1, -2)}, r"tensor 'x': a dimension is a size, or -1 for any, got \(1, -2\)"),
        ({"shape": (1.0,)}, r"got \(1.0,\)"),
        ({"shape": (2,), "labels": ("a", "b", "c")}, "tensor 'x': 3 labels for a last dimension of 2"),
    ],
)
def test_a_tensor_that_v2_does_not_have_cannot_be_declared(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TensorSpec(**{"name": "x", **fields})


def test_labels_may_be_fewer_than_the_indices() -> None:
    for shape in ((3,), (-1,), None, ()):
        assert TensorSpec(name="x", shape=shape, labels=("a", "b")).labels == ("a", "b")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"inputs": (Y, Y)}, "model 'm': two inputs have the name 'y'"),
        ({"outputs": (Y, Y)}, "model 'm': two outputs have the name 'y'"),
        ({"outputs": (TensorSpec(name="y", optional=True),)}, "model 'm': output 'y' cannot be optional"),
        ({"inputs": ("y",)}, "model 'm': inputs are TensorSpecs, not str"),
        ({"max_batch_size": -1}, "model 'm': max_batch_size must be at least 0, not -1"),
        ({"max_batch_size": 2, "pieces": True}, "model 'm': a request that comes in pieces cannot be part of a batch"),
        ({"family": Family.TEXT, "inputs": (Y,)}, "model 'm': a text model has no tensors to declare"),
        ({"family": Family.PARTS, "pieces": True}, "model 'm': a parts model has no tensors to declare"),
    ],
)
def test_a_model_that_contradicts_itself_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    spec = spec_of(duplex, "m", inputs=None)
    with pytest.raises((ValueError, TypeError), match=said):
        spec_of(spec, **fields)


# -- arrays that are declared and not annotated

X_IN, Y_OUT = TensorSpec(name="x", datatype="FP32", shape=(2,)), TensorSpec(name="y", datatype="FP32", shape=(2,))


@declare(inputs=[X_IN], outputs=[Y_OUT])
def by_name(x):  # type: ignore[no-untyped-def]
    return {"y": x * 2}


@declare(inputs=[X_IN], outputs=[Y_OUT])
def by_request(request):  # type: ignore[no-untyped-def]
    return {"y": request["x"] * 2}


@declare(outputs=[Y_OUT])
def outputs_alone(request):  # type: ignore[no-untyped-def]
    return {"y": request["x"] * 2}


@declare(inputs=[X_IN], outputs=[Y_OUT])
async def by_session(session):  # type: ignore[no-untyped-def]
    async for request in session:
        await session.send(InferResponse(outputs=(Tensor(name="y", data=request["x"] * 2),)))


@declare(inputs=[X_IN], outputs=[Y_OUT])
class DeclaredAlone:
    def __call__(self, x):  # type: ignore[no-untyped-def]
        return {"y": x * 2}


@declare(inputs=[X_IN], outputs=[Y_OUT])
@asynccontextmanager
async def declared_loader():  # type: ignore[no-untyped-def]
    yield lambda x: {"y": x * 2}


@pytest.mark.parametrize(
    "thing",
    [by_name, by_request, outputs_alone, by_session, DeclaredAlone(), declared_loader],
    ids=lambda thing: str(thing)[:20],
)
async def test_a_declaration_is_enough_without_annotations(thing: Any) -> None:
    spec = spec_of(thing, "m")
    assert spec.family is Family.TENSOR
    assert spec.outputs == (Y_OUT,)
    assert spec.inputs == (None if thing is outputs_alone else (X_IN,))
    sent: list[InferResponse] = []
    async with spec.load() as model:
        await model(Session(Once(InferRequest(inputs=(Tensor(name="x", data=np.ones(2, np.float32)),)), sent)))
    assert [(t.name, t.data.tolist()) for t in sent[0].outputs] == [("y", [2, 2])]


class Once:
    """A client with one request."""

    def __init__(self, request: InferRequest, sent: list[InferResponse]) -> None:
        self._request: InferRequest | None = request
        self.send_to = sent

    async def receive(self) -> InferRequest:
        await trio.lowlevel.checkpoint()
        request, self._request = self._request, None
        if request is None:
            raise trio.EndOfChannel
        return request

    async def send(self, message: InferResponse, /) -> None:
        await trio.lowlevel.checkpoint()
        self.send_to.append(message)


def test_a_declaration_does_not_hide_that_the_annotation_says_something_else() -> None:
    @declare(inputs=[X_IN])
    def texts(text: str) -> str:
        return text

    assert spec_of(texts).family is Family.TEXT


def test_without_a_declaration_an_annotation_is_asked_for_as_before() -> None:
    with pytest.raises(TypeError, match="annotate 'x'"):
        spec_of(lambda x: x, "m")


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float6_e2m3fn"])
def test_an_output_of_fewer_bits_than_v2_has_says_what_can_be_done(name: str) -> None:
    data = np.zeros(2, getattr(ml_dtypes, name))
    with pytest.raises(TypeError, match=rf"tensor 'y': no v2 datatype for numpy dtype {name}: v2 has FP16, BF16.*cast"):
        Tensor(name="y", data=data)
