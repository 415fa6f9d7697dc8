"""Dynamic batching: calls a tensor model with the rows of several requests, and gives each its own rows of the answer.

It is Triton's dynamic batcher. A request waits in the bucket of requests that it may be joined with (`models.rows`), in the
order of priority and then of arrival. Among buckets, the one whose first request is first in that order goes first. A batch
starts when one of the model's instances is idle and the bucket has a preferred number of rows, or no room for its next
request, or a request that has waited for `max_delay`. The following holds at any time, whatever is cancelled:

    a request leaves, or its deadline passes, in the queue   it is in no batch
    it leaves while its batch runs                           its rows are dropped, and the others get theirs; its place in
                                                             the capacity is taken until the batch is over
    the last one leaves while its batch runs                 the call is cancelled
    the call raises                                          each request is called again, alone and once (`Batching.retry`)
    the answer cannot be cut into rows                       all requests of the batch get that error

A request with a `sequence_id` is never joined, and runs when all earlier requests of its sequence are over.
"""

from __future__ import annotations

import contextvars
import logging
from bisect import insort
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from itertools import count
from time import perf_counter_ns
from typing import Any, Protocol, final

import trio

from models.blocking import Step, StepHolder, Steps, detached, run_step, set_step_holder, step_holder, throw
from models.errors import BAD_INPUTS, CallLost, ModelError, is_failure, is_out_of_memory, leaves
from models.messages import InferRequest, InferResponse
from models.rows import Rows, elements_of, rows_of, size_of
from models.session import Call, Session
from models.spec import Batching, Model, ModelSpec

log = logging.getLogger("models.batching")

_LONG = 2 * 1024 * 1024  # bytes whose copying would delay the loop
_MANY = 4096  # objects, likewise
_OBJECT = 64  # bytes of memory that an element takes beyond its content
_FOREVER = float("inf")


class Executions(Protocol):
    """Counts the calls of a model."""

    def executed(self, rows: int, joining: int, infer: int, cutting: int, copied: int) -> None:
        """Counts an answered call of `rows` rows. Times are in nanoseconds; `copied` is the number of joined bytes."""


def running(spec: ModelSpec, executions: Executions, steps: Steps) -> AbstractAsyncContextManager[Model]:
    """Loads the model of `spec`, and calls it in batches if the spec has `batching`."""
    return spec.load() if spec.batching is None else _batched(spec, spec.batching, executions, steps)


@asynccontextmanager
async def _batched(spec: ModelSpec, batching: Batching, executions: Executions, steps: Steps) -> AsyncIterator[Model]:
    async with spec.load() as model, trio.open_nursery() as nursery:
        batcher = Batcher(model, spec, batching, executions, steps, nursery)
        try:
            yield batcher
        finally:
            batcher.close()
            nursery.cancel_scope.cancel()


@final
class _Waiting:
    """A request in the queue or in a batch, and the task that waits for its answer."""

    __slots__ = (
        "asked", "bucket", "error", "holder", "joinable", "number", "priority", "request", "response", "rows", "run",
        "session", "since", "task",
    )  # fmt: skip

    def __init__(self, request: InferRequest, session: Session[Any, Any], number: int, priority: int, since: float) -> None:
        self.request, self.session, self.number, self.priority, self.since = request, session, number, priority, since
        self.rows, self.joinable = rows_of(request), True
        self.response: InferResponse
        self.error: BaseException | None = None
        self.task = trio.lowlevel.current_task()
        self.holder: StepHolder = step_holder()
        self.asked = perf_counter_ns()
        self.bucket: _Bucket | None = None
        self.run: _Run | None = None

    def answer(self, response: InferResponse) -> None:
        self.response = response
        trio.lowlevel.reschedule(self.task)

    def fail(self, error: BaseException) -> None:
        self.error = error
        trio.lowlevel.reschedule(self.task)

    def take_error(self) -> BaseException:
        """Returns the error for raising, and drops it here: its traceback will refer to the waiting task, which refers to
        this."""
        error, self.error = self.error, None
        assert error is not None
        return error

    def __lt__(self, other: _Waiting) -> bool:
        return (self.priority, self.number) < (other.priority, other.number)


@final
class _Bucket:
    """Requests that may be joined, in the order in which they go."""

    __slots__ = ("alone", "busy", "key", "waiting")

    def __init__(self, key: Hashable, *, alone: bool) -> None:
        self.key = key
        self.alone = alone
        """True if each runs alone: requests of a sequence, one that cannot be joined, one that is called again."""
        self.busy = False
        """True if a request of the sequence runs."""
        self.waiting: list[_Waiting] = []


@final
class _Run(StepHolder):
    """One call of the model. It holds an instance until the call, and every blocking step of it, is over."""

    __slots__ = ("_batcher", "_holds", "_left", "_paid", "bucket", "lied", "live", "members", "scope")

    def __init__(self, batcher: Batcher, bucket: _Bucket, members: list[_Waiting]) -> None:
        self._batcher, self.bucket = batcher, bucket
        self.members: list[_Waiting | None] = list(members)
        """None for a request that has left."""
        self.live = len(members)
        self.lied = False
        """True if the call gave an invalid answer: a retry would give it again."""
        self.scope = trio.CancelScope()
        self._holds, self._left = 1, list[StepHolder]()
        self._paid: Callable[[], None] | None = None

    def pay(self, requests: Sequence[InferRequest], rows: int) -> None:
        """Reserves memory for objects made of BYTES elements in joined requests, until everything of the call is over."""
        if len(requests) == 1 and rows == rows_of(requests[0]):
            return  # it is passed on as it came
        size = 0
        for request in requests:
            if (elements := elements_of(request)) is not None:
                size += _OBJECT * elements[0] + elements[1]
        if size:
            self._paid = self.reserve(size)

    def leave(self, waiting: _Waiting) -> None:
        self.members[self.members.index(waiting)] = None
        self.live -= 1
        waiting.holder.hold(stopping=not self.live)
        self._left.append(waiting.holder)
        if not self.live:
            self.scope.cancel()

    # the interface for its blocking steps

    @property
    def limiter(self) -> trio.CapacityLimiter:
        return self._batcher.steps.limiter

    def hold(self, *, stopping: bool = True) -> None:
        self._holds += 1

    def release(self) -> None:
        self._holds -= 1
        if not self._holds:
            self._batcher.steps.over(self)
            self._free()

    def begin(self, step: Step) -> None:
        self._holds += 1
        self._batcher.steps.begin(step, self)

    def end(self, step: Step) -> None:
        self._batcher.steps.end(step)
        self.release()

    def reserve(self, n: int) -> Callable[[], None]:
        for waiting in self.members:
            if waiting is not None:
                return waiting.holder.reserve(n)
        return super().reserve(n)

    def interrupt(self, text: str) -> None:
        for waiting in list(self.members):
            if waiting is not None:
                waiting.holder.interrupt(text)

    def replace(self) -> None:
        self._free()

    def ran_in(self, instance: int) -> None:
        for waiting in self.members:
            if waiting is not None:
                waiting.holder.ran_in(instance)

    def stuck_there(self, *, step: bool, stack: str, replaced: bool) -> None:
        self._batcher.steps.stuck_elsewhere(self, step=step, stack=stack, replaced=replaced)

    def _free(self) -> None:
        if self._paid is not None:
            self._paid()
        left, self._left = self._left, []
        for holder in left:
            holder.release()
        self._batcher.over(self)


@final
class Batcher:
    """A model that takes requests, joins them, and calls another model with the result.

    Its tasks run in the nursery of the caller that loads the model. Call `close` before that nursery ends: requests that
    still wait then get an error. A cancelled call leaves the queue or its batch at once.
    """

    def __init__(
        self,
        model: Model,
        spec: ModelSpec,
        batching: Batching,
        executions: Executions,
        steps: Steps,
        nursery: trio.Nursery,
    ) -> None:
        self._model, self._spec, self._batching, self._executions = model, spec, batching, executions
        self.steps = steps
        self._rows, self._most = Rows(spec), spec.max_batch_size
        self._preferred = sorted(set(batching.preferred))
        self._nursery, self._context = nursery, contextvars.copy_context()  # so that a batch has no request's variables
        self._buckets: dict[Hashable, _Bucket] = {}
        self._runs: set[_Run] = set()
        self._stranded: set[_Waiting] = set()
        """Requests whose run was cancelled together with the model; the caller that ends the model should end them first."""
        self._numbers = count()
        self._closed = False
        self._due, self._sleep = _FOREVER, trio.CancelScope()
        if batching.max_delay:
            nursery.start_soon(self._alarm)

    @property
    def queued(self) -> int:
        """The number of requests that are in no batch yet."""
        return sum(len(bucket.waiting) for bucket in self._buckets.values())

    async def __call__(self, session: Session[Any, Any]) -> None:
        async for request in session:
            await session.send(await self._answer(request, session))

    async def _answer(self, request: InferRequest, session: Session[Any, Any]) -> InferResponse:
        priority = self._priority_of(request)
        if self._closed:
            raise _unloaded(self._spec)
        waiting = _Waiting(request, session, next(self._numbers), priority, trio.current_time())
        self._put(waiting, *self._place_of(waiting))
        self._dispatch()

        def leave(_: object) -> trio.lowlevel.Abort:
            if waiting.run is not None:
                waiting.run.leave(waiting)
            elif waiting.bucket is not None:
                self._remove(waiting, waiting.bucket)
            self._stranded.discard(waiting)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(leave)
        if waiting.error is not None:
            throw(waiting.take_error())
        return waiting.response

    def _priority_of(self, request: InferRequest) -> int:
        levels = self._batching.priority_levels
        if not levels:
            return 0
        said = request.parameters.get("priority", 0)
        if type(said) is not int or said < 0:
            raise ModelError(
                "parameter priority of the request must be a whole number, 0 for the model's default, "
                f"got {str(said)[:40]!r}",
                code="BadParameter",
                status=400,
            )
        return said if 0 < said <= levels else self._batching.default_priority or levels

    def _place_of(self, waiting: _Waiting) -> tuple[Hashable, bool]:
        """The key of its bucket, and True if it runs alone there."""
        key = self._rows.key_of(waiting.request)
        waiting.joinable = key is not None
        sequence = waiting.request.parameters.get("sequence_id")
        if sequence:  # 0 and "" are no sequence
            return ("sequence", type(sequence), sequence), True
        return (object(), True) if key is None else (key, False)

    # -- the queue: synchronous, so that no other task sees an intermediate state ----------------------------------------

    def _put(self, waiting: _Waiting, key: Hashable, alone: bool) -> None:
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(key, alone=alone)
        if alone:
            bucket.waiting.append(waiting)  # the order within a sequence is kept, whatever the priority
        else:
            insort(bucket.waiting, waiting)
        waiting.bucket = bucket

    def _remove(self, waiting: _Waiting, bucket: _Bucket) -> None:
        bucket.waiting.remove(waiting)
        waiting.bucket = None
        self._tidy(bucket)

    def _tidy(self, bucket: _Bucket) -> None:
        if not bucket.waiting and not bucket.busy and self._buckets.get(bucket.key) is bucket:
            del self._buckets[bucket.key]

    def _dispatch(self) -> None:
        """Starts the batches that may start now, and sets the alarm for those that may start later."""
        if self._closed:
            return
        while len(self._runs) < self._batching.instances and self._buckets:
            now, first, chosen, later = trio.current_time(), None, [], _FOREVER
            for bucket in list(self._buckets.values()):
                members, due = self._choice(bucket, now)
                if members and (first is None or members[0] < first):
                    first, chosen = members[0], members
                later = min(later, due)
            if not chosen:
                self._due = self._sleep.deadline = later
                return
            self._start(chosen)

    def _choice(self, bucket: _Bucket, now: float) -> tuple[list[_Waiting], float]:
        """The requests of a bucket that may start now, in order; if there are none, the time when some may."""
        if bucket.busy:
            return [], _FOREVER
        late = [waiting for waiting in bucket.waiting if waiting.session.deadline <= now]
        for waiting in late:  # the owner of its deadline has cancelled it, or is about to
            self._remove(waiting, bucket)
        if not bucket.waiting:
            return [], _FOREVER
        if bucket.alone:
            return bucket.waiting[:1], now
        rows = taken = preferred = 0
        full = False
        for waiting in bucket.waiting:
            full = rows + waiting.rows > self._most
            if full:
                break
            rows, taken = rows + waiting.rows, taken + 1
            if rows in self._preferred:
                preferred = taken
        if preferred:
            return bucket.waiting[:preferred], now
        due = min([waiting.since for waiting in bucket.waiting]) + self._batching.max_delay
        if full or rows == self._most or due <= now:
            return bucket.waiting[:taken], now
        return [], due

    def _start(self, members: list[_Waiting]) -> None:
        bucket = members[0].bucket
        assert bucket is not None
        del bucket.waiting[: len(members)]
        run, now = _Run(self, bucket, members), perf_counter_ns()
        for waiting in members:
            waiting.run, waiting.bucket = run, None
            waiting.holder.waited(now - waiting.asked)
        bucket.busy = bucket.alone
        self._tidy(bucket)
        self._runs.add(run)
        self._context.run(self._nursery.start_soon, self._execute, run)

    def over(self, run: _Run) -> None:
        """Marks the instance of a run as idle again."""
        if run in self._runs:  # if not, it was replaced before
            self._runs.remove(run)
            run.bucket.busy = False
            self._tidy(run.bucket)
            self._dispatch()

    async def _alarm(self) -> None:
        while True:
            with trio.CancelScope(deadline=self._due) as self._sleep:
                await trio.sleep_forever()
            self._due = _FOREVER
            self._dispatch()

    @property
    def __model_instances__(self) -> Iterable[Any]:
        """The instances of the model itself, if it runs in processes."""
        instances: Iterable[Any] = getattr(self._model, "__model_instances__", ())
        return instances

    def close(self) -> None:
        """Ends the batcher: nothing starts any more, and all waiting requests get an error. Idempotent."""
        self._closed = True
        left, self._stranded = self._stranded, set()
        for bucket in self._buckets.values():
            left.update(bucket.waiting)
        self._buckets.clear()
        for run in self._runs:
            left.update(self._told(run))
        for waiting in left:
            waiting.bucket = None
            waiting.fail(_unloaded(self._spec))

    # -- a batch -----------------------------------------------------------------------------------------------------

    async def _execute(self, run: _Run) -> None:
        set_step_holder(run)
        errors: list[BaseException] = []
        try:
            with run.scope:
                try:
                    await self._call(run)
                except BaseException as e:  # SystemExit too: a model can end only its own requests
                    if not is_failure(e):
                        raise self._cancelled(e) from None
                    errors = list(leaves(e))
                    self._failed(run, errors[0] if len(errors) == 1 else e)
                    # an exception from a thread is in a cycle; the log line of each request tells where it was raised
                    detached(e, (ModelError,))
        finally:
            errors = []  # they refer to this frame, and the cycle would keep the requests alive
            self._stranded.update(self._told(run))
            run.release()

    async def _call(self, run: _Run) -> None:
        members = [waiting for waiting in run.members if waiting is not None]
        if not members:
            return  # they left before it began
        began, first = perf_counter_ns(), members[0]
        requests = [waiting.request for waiting in members]
        given = sum([waiting.rows for waiting in members])
        rows = self._padded(given) if first.joinable else given
        run.pay(requests, rows)
        joined, copied = await self._join(requests, rows)
        made = perf_counter_ns()
        channel = _OneCall(self._spec, run, joined)
        call = (lambda: first.session.call) if len(members) == 1 else partial(self._call_of, joined)
        deadline = max([waiting.session.deadline for waiting in members])
        try:
            await self._model(Session(channel, call, deadline=deadline))
        except trio.EndOfChannel:
            pass  # it read on past the end of input, which is how many loops end
        except BaseExceptionGroup as e:
            if not all(isinstance(error, trio.EndOfChannel) for error in leaves(e)):
                raise
        answered = perf_counter_ns()
        run.lied = True  # until the answer is checked
        response = channel.answer()
        own = self._rows.cut(response, requests, rows) if first.joinable else [response]
        for waiting, its_own in zip(members, own, strict=True):
            waiting.response = its_own
        self._executions.executed(max(given, 1), made - began, answered - made, perf_counter_ns() - answered, copied)
        for waiting in self._told(run):
            waiting.answer(waiting.response)

    def _padded(self, rows: int) -> int:
        if self._batching.pad_rows and rows:
            return next((preferred for preferred in self._preferred if preferred >= rows), rows)
        return rows

    async def _join(self, requests: Sequence[InferRequest], rows: int) -> tuple[InferRequest, int]:
        """The requests as one, and the number of bytes that were copied for it."""
        if len(requests) == 1 and rows == rows_of(requests[0]):
            return self._rows.join(requests, rows), 0
        size, objects = size_of(requests)
        if size > _LONG or objects > _MANY:
            return await run_step(partial(self._rows.join, requests, rows)), size
        return self._rows.join(requests, rows), size

    def _call_of(self, joined: InferRequest) -> Call:
        return Call(model=self._spec.name, version=self._spec.version, parameters=joined.parameters)

    def _told(self, run: _Run) -> list[_Waiting]:
        """The requests that still wait for this run; they no longer do from now on."""
        members = [waiting for waiting in run.members if waiting is not None]
        run.members = []
        for waiting in members:
            waiting.run = None
        return members

    def _cancelled(self, error: BaseException) -> BaseException:
        """The cancellation out of an exception group, whatever else the cancelled tasks raised on their way out."""
        if not isinstance(error, BaseExceptionGroup):
            return error
        cancelled, rest = error.split(trio.Cancelled)
        if cancelled is None or (rest is not None and not is_failure(rest)):
            return error
        if rest is not None:
            log.warning("model raised while cancelled", extra={"model": self._spec.name}, exc_info=rest)
            detached(rest)
        return cancelled

    def _failed(self, run: _Run, error: BaseException) -> None:
        together = len(run.members)
        members = self._told(run)
        again = self._batching.retry or (isinstance(error, ModelError) and error.code == BAD_INPUTS)
        if together == 1 or run.lied or not again or isinstance(error, CallLost):
            for waiting in members:
                waiting.fail(error if together == 1 else _anew(error, together))
            return
        if not members:
            return
        log.warning(
            "a batch failed; each of its requests is called again, alone",
            extra={"model": self._spec.name, "requests": together, "left": together - len(members)},
            exc_info=error,
        )
        for waiting in members:
            waiting.asked = perf_counter_ns()
            self._put(waiting, object(), alone=True)


@final
class _OneCall:
    """A channel with one request in and one response out; neither direction waits."""

    complete = False  # its model ends the answer by returning

    def __init__(self, spec: ModelSpec, run: _Run, request: InferRequest) -> None:
        self._spec, self._run, self._request = spec, run, request
        self.exhausted = self._more = False
        self._response: InferResponse | None = None

    @property
    def joined(self) -> list[Session[Any, Any]]:
        """The sessions of its requests, without those that have left."""
        return [waiting.session for waiting in self._run.members if waiting is not None]

    async def receive(self) -> InferRequest:
        if self.exhausted:
            await trio.lowlevel.checkpoint()
            raise trio.EndOfChannel
        self.exhausted = True
        return self._request

    async def send(self, message: InferResponse, /) -> None:
        if self._response is not None:
            self._more = self._run.lied = True
            raise self._too_many()
        self._response = message

    def answer(self) -> InferResponse:
        """The response of the model. ModelError unless there was exactly one."""
        if self._response is None:
            raise ModelError(f"model {self._spec.name!r} returned without an answer", code="NoAnswer", status=500)
        if self._more:
            raise self._too_many()
        return self._response

    def _too_many(self) -> ModelError:
        return ModelError(
            f"model {self._spec.name!r} gave more than one response to a call, which has one where requests are batched "
            f"(models.{self._spec.name}.batching)",
            code="TooManyResponses",
            status=500,
        )


def _anew(error: BaseException, together: int) -> Exception:
    """A new error for one request of a failed batch: an exception has only one traceback."""
    found: Exception
    if isinstance(error, ModelError):
        found = ModelError(error.message, code=error.code, status=error.status)
    elif isinstance(error, CallLost):
        found = type(error)(str(error))
    else:
        kind = MemoryError if is_out_of_memory(error) else RuntimeError
        found = kind(f"the call of a batch of {together} requests raised {_text(error)}")
    found.__cause__ = error
    return found


def _text(error: BaseException) -> str:
    try:
        said = str(error)
    except Exception:  # `__str__` is the author's own code
        said = ""
    if said and getattr(error, "kind_there", ""):
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _unloaded(spec: ModelSpec) -> RuntimeError:
    return RuntimeError(f"model {spec.name!r} was unloaded")
