"""A Trio run in its own thread, for programs without an event loop: any thread can call async functions in it."""

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

_LAST = 5.0  # seconds that a caller waits for cancelled tasks, or for the thread, to end


class Closed(Exception):
    """Raised if the portal, or the client that owns it, was closed."""


@final
class Portal:
    """A Trio run in a thread, which lasts until `close`, until the portal is collected, or until the program ends.

    Ctrl-C in a thread that waits for a call cancels the call. `closing` is called in the run's thread at its end.
    """

    def __init__(self, closing: Callable[[], None]) -> None:
        self._run = run = _Run(closing)
        thread = threading.Thread(target=run.main, name="everywire-client", daemon=True)
        thread.start()
        # Not a method: its reference to the portal would prevent the collection.
        self._close = weakref.finalize(self, _close, run, thread)
        run.begun.wait()

    def call(self, function: Callable[..., Awaitable[T]], *arguments: Any, timeout: float | None) -> T:
        """Calls an async function in the run, and returns its result or raises its exception. TimeoutError if it takes
        longer than `timeout` seconds, Closed if the portal is closed before it returns: the function is then cancelled.
        RuntimeError in a task of Trio, as the call would block its loop."""
        _check_thread()
        future: Future[T] = Future()
        scope = trio.CancelScope()
        try:
            # In the `try`: Ctrl-C may come between `submit` and `result`.
            if self._run.submit(_performed, future, scope, function, arguments, timeout):
                return future.result()
        except BaseException:
            # Ctrl-C: a running function is cancelled, and one that has not begun does not begin.
            if not (future.done() or future.cancel()):
                self._run.soon(scope.cancel)
                with suppress(BaseException):
                    future.exception(_LAST)
            raise
        raise Closed("the client is closed")

    @property
    def detached(self) -> Callable[[Callable[[], object]], None]:
        """A function that calls another one in the run's thread, later, unless the run is over. It does not keep the portal
        from being collected."""
        return self._run.soon

    def close(self) -> None:
        """Cancels all calls, which raise Closed, and waits up to 5 seconds for the thread. A second call does nothing."""
        self._close()


@final
class _Run:
    """The state that the thread and its tasks share. It does not refer to the portal."""

    def __init__(self, closing: Callable[[], None]) -> None:
        self.begun = threading.Event()
        self._closing = closing
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._lock = threading.Lock()
        self._waiting: set[Future[Any]] = set()
        self._over = False

    def main(self) -> None:
        """Runs Trio in the thread until `stop`."""
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
        """Starts the function in the run. False if the run is over; if True, the future always gets a result or an
        exception."""
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
    if threading.current_thread() is not thread:  # the portal may be collected in the run's thread
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
        settle(future, Closed("the client was closed"))  # no effect if the future has its end already


def settle(future: Future[Any], error: BaseException | None, result: object = None) -> None:
    """Sets the future's exception or result, unless it has one already."""
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
