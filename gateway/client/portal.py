"""A Trio run in a thread of its own, for programs that have no event loop: calls of async functions from any thread."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar, final

import trio

T = TypeVar("T")

_LAST = 5.0  # seconds that cancelled tasks, and the thread, have for their end


class Closed(Exception):
    """The portal, or the client that has it, was closed."""


@final
class Portal:
    """The run lasts until `close`, until nobody has the portal any more, or to the end of the program, whichever is first.

    Ctrl-C in a thread that waits for a call cancels the call. `closing` is called in the run's thread at its end.
    """

    def __init__(self, closing: Callable[[], None]) -> None:
        self._run = run = _Run(closing)
        thread = threading.Thread(target=run.main, name="everywire-client", daemon=True)
        thread.start()
        # not a method of ours, which would keep us
        self._close = weakref.finalize(self, _close, run, thread)
        run.begun.wait()

    def call(self, function: Callable[..., Awaitable[T]], *arguments: Any, timeout: float | None) -> T:
        """What the function returns, or raises. TimeoutError where that takes longer than `timeout` seconds, and Closed
        where the portal is, or comes to be: the function has then been cancelled. RuntimeError in a task of Trio's, which
        would hold up all others of its loop."""
        _check_thread()
        future: Future[T] = Future()
        scope = trio.CancelScope()
        try:
            # Ctrl-C may come before it is waited for: the other thread may have been that quick
            if self._run.submit(_performed, future, scope, function, arguments, timeout):
                return future.result()
        except BaseException:
            # Ctrl-C: what was called goes no further than this, and what has not begun does not begin
            if not (future.done() or future.cancel()):
                self._run.soon(scope.cancel)
                with suppress(BaseException):
                    future.exception(_LAST)
            raise
        raise Closed("the client is closed")

    @property
    def detached(self) -> Callable[[Callable[[], object]], None]:
        """Calls a function in the run's thread, some time, unless the run is over; it does not keep the portal."""
        return self._run.soon

    def close(self) -> None:
        """Cancels what is under way, whose callers see Closed, and waits up to 5 seconds for the thread. A second call does
        nothing."""
        self._close()


@final
class _Run:
    """What the thread and its tasks know."""

    def __init__(self, closing: Callable[[], None]) -> None:
        self.begun = threading.Event()
        self._closing = closing
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._lock = threading.Lock()
        self._waiting: set[Future[Any]] = set()
        self._over = False

    def main(self) -> None:
        """The thread's."""
        try:
            trio.run(self._main)
        finally:
            with self._lock:
                self._over = True
                waiting, self._waiting = self._waiting, set()
            for future in waiting:
                settle(future, Closed("the client was closed"))
            self.begun.set()

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self.begun.set()
                await trio.sleep_forever()
        finally:
            self._closing()

    def submit(self, function: Callable[..., Awaitable[None]], future: Future[Any], *arguments: Any) -> bool:
        """Whether the function was given to the run; the future then has its end, whatever that is."""
        with self._lock:
            if self._over:
                return False
            self._waiting.add(future)
        future.add_done_callback(self._forget)

        def start() -> None:
            assert self._nursery is not None
            if not future.set_running_or_notify_cancel():
                return
            try:
                self._nursery.start_soon(function, future, *arguments)
            except RuntimeError:  # the run is ending
                settle(future, Closed("the client was closed"))

        self.soon(start)
        return True

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._waiting.discard(future)

    def soon(self, function: Callable[[], object]) -> None:
        assert self._token is not None
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(function)

    def stop(self) -> None:
        assert self._nursery is not None
        self._nursery.cancel_scope.cancel()


def _close(run: _Run, thread: threading.Thread) -> None:
    run.soon(run.stop)
    if threading.current_thread() is not thread:  # where it is collected there
        thread.join(_LAST)


async def _performed(
    future: Future[Any],
    scope: trio.CancelScope,
    function: Callable[..., Awaitable[Any]],
    arguments: tuple[Any, ...],
    patience: float | None,
) -> None:
    try:
        with scope, trio.fail_after(math.inf if patience is None else patience):
            settle(future, None, await function(*arguments))
    except trio.TooSlowError:
        settle(future, TimeoutError(f"not over after {patience:g} s"))
    except Exception as e:
        settle(future, e)
    finally:
        settle(future, Closed("the client was closed"))  # where nothing else has been said


def settle(future: Future[Any], error: BaseException | None, result: object = None) -> None:
    """The future's end, unless it has one."""
    if not future.done():
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _check_thread() -> None:
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return
    raise RuntimeError("this client blocks its thread, and a task of Trio's runs in it: use gateway.client.open_client")
