"""The certificate that the listeners show, and how another one takes its place while they listen."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias, final

import trio

from gateway.config import TLSConfig
from gateway.config.problem import ConfigError
from gateway.net.certificate import Certificate, read_served
from gateway.net.tls_context import development_certificate, server_context
from models.blocking import detached, in_thread

log = logging.getLogger("gateway.tls")

_Stamp: TypeAlias = tuple[tuple[int, ...], ...]
"""The state of the files: if it differs, one of them has changed."""

_TRIES = 3  # to read files while somebody writes them


@final
class ServedCertificate:
    """A TLS context for the next connection, made anew when the files that it is made of have changed.

    A connection keeps the context that it began with. Files that cannot be served change nothing but the log, where an
    error says what is wrong with them.
    """

    def __init__(self, config: TLSConfig, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """Reads the files. ConfigError as `server_context` has it. `now` is the wall clock, aware."""
        self._config, self._now = config, now
        self._one_at_a_time = trio.Lock()
        self._stamp, made = self._make()
        if isinstance(made, Exception):
            try:
                raise made
            finally:
                del made
        self.context, self.certificate = made
        self._tell_dates()

    async def reload(self) -> Certificate:
        """Shows what the files hold now to every connection that begins from now on. ConfigError says which file cannot be
        served, and why; the certificate before it is shown on. Cancelled, it has changed nothing."""
        async with self._one_at_a_time:
            stamp, made = await in_thread(self._make, abandon_on_cancel=True)
            self._stamp = stamp  # kept for broken files too: they are tried again only once they have changed
            if isinstance(made, Exception):
                try:
                    raise made
                finally:
                    del made
            self.context, self.certificate = made
        new = self.certificate
        extra = {"subject": new.subject, "expires": new.expires.isoformat(), "fingerprint": new.fingerprint}
        log.info("certificate loaded", extra=extra)
        self._tell_dates()
        return new

    async def watch(self) -> None:
        """Reloads, until cancelled, when the files have changed and then stayed the same for `tls.reload_interval`: a
        certificate is often written before its key, and a long file not all at once. Returns at once where that is 0."""
        interval = self._config.reload_interval
        before = self._stamp
        while interval:
            await trio.sleep(interval)
            found = await in_thread(self._look, abandon_on_cancel=True)
            if found == before != self._stamp:
                try:
                    await self.reload()
                except Exception as error:  # no content of a file may end the server
                    tell_broken(error)
            before = found

    def _files(self) -> list[Path]:
        """Those that the context is made of, the certificate first. The development certificate is made, or renewed in its
        last day, which nobody else would do for it."""
        config = self._config
        if config.dev:
            made = development_certificate(config, now=self._now())
            files = [made.cert, made.key]
        else:
            files = [Path(config.cert), Path(config.key)]
        return [*files, Path(config.client_ca)] if config.client_ca else files

    def _look(self) -> _Stamp:
        try:
            return _stamps(self._files())
        except ConfigError:  # which is told where it is loaded
            return ()

    def _make(self) -> tuple[_Stamp, tuple[ssl.SSLContext, Certificate] | Exception]:
        """A context, or why there is none, and the files as they were before it was made of them."""
        stamp: _Stamp = ()
        made: tuple[ssl.SSLContext, Certificate] | Exception
        for _ in range(_TRIES):
            stamp = self._look()
            try:
                made = server_context(self._config, now=self._now()), read_served(self._files()[0])
            except Exception as error:
                made = detached(error)
            if stamp == self._look():
                break
        return stamp, made

    def _tell_dates(self) -> None:
        """A certificate out of its time is shown all the same, and clients refuse it: the operator is to know why."""
        now, shown = self._now(), self.certificate
        if not shown.begins <= now < shown.expires:
            dates = {"begins": shown.begins.isoformat(), "expires": shown.expires.isoformat()}
            log.warning(
                "the certificate is not valid now: clients will refuse it", extra={"subject": shown.subject, **dates}
            )


def tell_broken(error: Exception) -> None:
    """Logs that a reload has changed nothing."""
    reason = str(error) if isinstance(error, ConfigError) else repr(error)
    log.error("the certificate cannot be reloaded: the one before is shown on", extra={"reason": reason})


def _stamps(files: list[Path]) -> _Stamp:
    return tuple(_stamp(file) for file in files)


def _stamp(file: Path) -> tuple[int, ...]:
    try:
        found = os.stat(file)
    except OSError as error:
        return (error.errno or 0,)
    # the time of its last change of any kind too: its permissions may have been all that was wrong
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
