"""The certificate that the listeners show, and its replacement while they listen."""

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
"""Facts of each file that change when the file does."""

_TRIES = 3  # to read files that are being written meanwhile


@final
class ServedCertificate:
    """A TLS context for new connections. It is made again when its files have changed.

    A connection keeps the context that it began with. If the files cannot be served, an error in the log gives the
    reason, and nothing else changes.
    """

    def __init__(self, config: TLSConfig, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """Reads the files; raises ConfigError as `server_context` does. `now` gives the current time, with a zone."""
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
        """Reads the files again, for every connection that begins from now on. ConfigError says which file cannot be served,
        and why; then, and if this is cancelled, the previous certificate stays in use."""
        async with self._one_at_a_time:
            stamp, made = await in_thread(self._make, abandon_on_cancel=True)
            self._stamp = stamp  # also of broken files: they are not tried again until they have changed
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
        """Reloads, until cancelled, when the files have changed and then stayed unchanged for `tls.reload_interval`: a
        certificate is often written before its key, and a long file in parts. Returns at once if the interval is 0."""
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
        """Returns the files of the context, the certificate first. Makes the development certificate, or renews it in its
        last day: no other program does."""
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
        except ConfigError:  # `_make` reports it
            return ()

    def _make(self) -> tuple[_Stamp, tuple[ssl.SSLContext, Certificate] | Exception]:
        """Makes a context. Returns the facts of the files from before it was made, and the context or the error."""
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
        """Warns of a certificate that is not valid now. It is shown nonetheless, and the warning explains why clients refuse
        it."""
        now, shown = self._now(), self.certificate
        if not shown.begins <= now < shown.expires:
            dates = {"begins": shown.begins.isoformat(), "expires": shown.expires.isoformat()}
            log.warning(
                "the certificate is not valid now: clients will refuse it", extra={"subject": shown.subject, **dates}
            )


def tell_broken(error: Exception) -> None:
    """Logs the error of a reload, which has changed nothing."""
    reason = str(error) if isinstance(error, ConfigError) else repr(error)
    log.error("the certificate cannot be reloaded: the previous one stays in use", extra={"reason": reason})


def _stamps(files: list[Path]) -> _Stamp:
    return tuple(_stamp(file) for file in files)


def _stamp(file: Path) -> tuple[int, ...]:
    try:
        found = os.stat(file)
    except OSError as error:
        return (error.errno or 0,)
    # st_ctime_ns too: a change of permissions alone may repair a file
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
