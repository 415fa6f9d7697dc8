"""Opens listening sockets: for TCP and in the file system. Takes those that systemd has opened."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import final

from gateway.addresses import UNIX, Passed, UnixSocket, url_host
from models.blocking import throw

_EVERY = {"0.0.0.0", "::"}
_ABSENT = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
_TRIES = 16  # free ports that are tried until one is free at each of several addresses
_FIRST_PASSED = 3  # sd_listen_fds(3): SD_LISTEN_FDS_START
_LONGEST_PATH = 107 if sys.platform == "linux" else 103  # bytes: unix(7), sun_path without its final zero
_PATIENCE, _PAUSE = 1.0, 0.01  # seconds: to wait for another process's lock of a folder, and between tries


@final
class CannotListen(OSError):
    """An address or a port cannot be listened on. The text is for the operator: the address, the reason, and the setting."""

    def __str__(self) -> str:
        return str(self.strerror)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A port that is opened at each host of a setting."""

    number: int
    """The port's number. 0: any free port, the same at every host."""
    setting: str
    """The setting that the port comes from, as errors name it."""
    tls: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Options for opening sockets, and the names of the settings for errors."""

    backlog: int
    keepalive: float = 0.0
    """Seconds without a byte after which the kernel probes a TCP client (TCP keepalive); 0: never."""
    unix_mode: int = 0o600
    host_setting: str = "listen.host or --host"


# ---- TCP ----


def tcp_sockets(hosts: list[str], port: Port, rules: Rules) -> list[socket.socket]:
    """Opens a socket for each address, all at the same port. CannotListen if one cannot be opened; then none is open."""
    tries = 1 if port.number else _TRIES
    while True:
        tries -= 1
        try:
            return _at_one_port(hosts, port, rules)
        except CannotListen as e:
            if e.errno != errno.EADDRINUSE or not tries:
                raise


def _at_one_port(hosts: list[str], port: Port, rules: Rules) -> list[socket.socket]:
    number, opened = port.number, list[socket.socket]()
    resolved: dict[tuple[socket.AddressFamily, str], str] = {}
    for host in hosts:
        for found in _resolved(host, rules):
            resolved.setdefault(found, host)
    every = {family for family, address in resolved if address in _EVERY}
    # 0.0.0.0 or :: includes every other address of its family: those need no socket of their own
    resolved = {found: host for found, host in resolved.items() if found[1] in _EVERY or found[0] not in every}
    # `::` serves both families only if no IPv4 address is listed: its socket would take that address's port too
    both = all(family == socket.AF_INET6 for family, _ in resolved) and socket.has_dualstack_ipv6()
    with ExitStack() as stack:
        served, absent = set[str](), dict[str, CannotListen]()
        for (family, address), host in resolved.items():
            try:
                sock = socket.create_server(
                    (address, number), family=family, backlog=rules.backlog, dualstack_ipv6=both and address == "::"
                )
            except OSError as e:
                where, advice = f"{url_host(address)}:{number}", _advice(e, family, port, rules)
                if e.errno not in _ABSENT or host == address:
                    raise _cannot(where, e, advice) from e
                absent[host] = _cannot(where, e, advice)  # a name may have addresses that are not of this machine
                continue
            served.add(host)
            opened.append(stack.enter_context(sock))
            number = sock.getsockname()[1]
        for host in absent:
            if host not in served:
                throw(absent.pop(host))
        stack.pop_all()
    return opened


def _resolved(host: str, rules: Rules) -> list[tuple[socket.AddressFamily, str]]:
    """Resolves a host to its addresses. An address resolves to itself. CannotListen if there are none."""
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as e:  # UnicodeError: the text cannot be a host's name
        reason = (e.strerror if isinstance(e, OSError) else None) or str(e)
        raise CannotListen(
            errno.EADDRNOTAVAIL, f"cannot listen on {host}: {reason}; {rules.host_setting} sets an address of this machine"
        ) from e
    return [(family, str(name[0])) for family, _, _, _, name in found]


def _cannot(where: str, error: OSError, advice: str) -> CannotListen:
    # `create_server` appends the address to the reason
    reason = os.strerror(error.errno) if error.errno else (error.strerror or str(error)).partition(" (while")[0]
    return CannotListen(error.errno, f"cannot listen on {where}: {reason}; {advice}")


def _advice(error: OSError, family: int, port: Port, rules: Rules) -> str:
    if error.errno in _ABSENT and family == socket.AF_INET6 and not _has_ipv6():
        return f"this machine has no IPv6: {rules.host_setting} sets an IPv4 address, 0.0.0.0 for every one"
    if error.errno in _ABSENT:
        return f"{rules.host_setting} sets an address of this machine"
    if error.errno == errno.EACCES:
        return f"a port below 1024 needs root or CAP_NET_BIND_SERVICE; {port.setting} sets another"
    return f"{port.setting} sets another"


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


# ---- Unix sockets ----


@final
@dataclass(frozen=True, slots=True)
class File:
    """The file of a Unix socket that this process has made. It is told from a later file at the path by its inode."""

    path: str
    device: int
    inode: int

    @classmethod
    def at(cls, path: str) -> File:
        found = os.lstat(path)
        return cls(path, found.st_dev, found.st_ino)

    def remove(self) -> None:
        with suppress(OSError):
            if File.at(self.path) == self:
                os.unlink(self.path)


def unix_socket(place: UnixSocket, rules: Rules) -> tuple[socket.socket, File]:
    path = os.path.abspath(place.path)
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise CannotListen(
            errno.ENAMETOOLONG,
            f"cannot listen on {UNIX}{path}: the path has {len(os.fsencode(path))} bytes, and that of a Unix socket at most "
            f"{_LONGEST_PATH}; {rules.host_setting} sets another",
        )
    folder = os.path.dirname(path)
    try:
        with _alone_in(folder), ExitStack() as stack:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                sock.bind(path)
            except OSError as e:
                if e.errno != errno.EADDRINUSE:
                    raise
                _remove_stale(path, rules)
                sock.bind(path)
            file = File.at(path)
            stack.callback(file.remove)
            os.chmod(path, rules.unix_mode)  # clients cannot connect before `listen`
            sock.listen(rules.backlog)
            stack.pop_all()
    except CannotListen:
        raise
    except OSError as e:
        advice = f"{rules.host_setting} sets another path"
        if e.errno == errno.ENOENT:
            advice = f"make the folder {folder}, or {advice}"
        elif e.errno in (errno.EACCES, errno.EPERM):
            advice = f"the user of this process must be able to write to {folder}, or {advice}"
        raise _cannot(f"{UNIX}{path}", e, advice) from e
    return sock, file


@contextmanager
def _alone_in(folder: str) -> Iterator[None]:
    """Locks the folder: inside the block no other gateway opens a socket there. Without the lock, two that find a stale file
    could both remove it, and the second would remove the first one's new socket."""
    with ExitStack() as stack:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except PermissionError:  # a file can be made in a folder that cannot be read: then without the lock
            pass
        else:
            stack.callback(os.close, descriptor)
            _lock(descriptor)
        yield


def _lock(descriptor: int) -> None:
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as e:
            if e.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > until:
                return  # the file system has no locks, or another process keeps its lock: go on without
        time.sleep(_PAUSE)


def _remove_stale(path: str, rules: Rules) -> None:
    """Removes the file of a Unix socket on which no process listens. CannotListen for any other file."""

    def refused(why: str) -> CannotListen:
        text = f"cannot listen on {UNIX}{path}: {why}; {rules.host_setting} sets another path"
        return CannotListen(errno.EADDRINUSE, text)

    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise refused("a file that is not a socket is there: remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except FileNotFoundError:
            return
        except PermissionError:
            raise refused("another user's socket is there, and this user may not connect to it") from None
        except OSError:
            pass  # such as EAGAIN: the queue of a busy listener is full
    raise refused("another process listens on it")


# ---- from systemd ----


def passed_sockets(place: Passed, rules: Rules, environ: Mapping[str, str]) -> list[socket.socket]:
    """Returns the sockets that systemd has passed, by its protocol (sd_listen_fds(3)). They are duplicates, so that each
    can be asked for again. Child processes inherit none of them. CannotListen if one is missing or unfit."""

    def refused(why: str) -> CannotListen:
        shown = f"systemd{'+tls' * place.tls}{':' * bool(place.name)}{place.name}"
        return CannotListen(errno.EBADF, f"cannot listen on {shown} ({rules.host_setting}): {why}")

    process, count = environ.get("LISTEN_PID", ""), environ.get("LISTEN_FDS", "")
    if not count:
        raise refused("no socket was passed, LISTEN_FDS is not set; start this program by its .socket unit")
    if process != str(os.getpid()):
        other = process[:20] or "(LISTEN_PID is not set)"
        raise refused(
            f"the sockets were passed to process {other}, and this one is {os.getpid()}: a script in between must use `exec`"
        )
    if not count.isdecimal() or not 0 < int(count) < 1 << 16:
        raise refused(f"LISTEN_FDS must be a number of sockets from 1 to 65535, not {count[:20]!r}")
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    passed = {_FIRST_PASSED + n: names[n] if n < len(names) else "" for n in range(int(count))}
    chosen = [number for number, name in passed.items() if place.name in ("", name)]
    if not chosen:
        there = ", ".join(sorted({repr(name[:100]) for name in passed.values()}))
        raise refused(f"no socket of that name was passed, only {there}: FileDescriptorName= of the .socket unit sets it")
    with ExitStack() as stack:
        sockets = []
        for number in chosen:
            what = f"descriptor {number} ({passed[number][:100]!r})"
            try:
                os.set_inheritable(number, False)
                sock = stack.enter_context(socket.socket(fileno=os.dup(number)))
                listens = sock.type == socket.SOCK_STREAM and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            except OSError as e:
                raise refused(f"{what} is not a socket: {e.strerror}") from e
            if sock.type != socket.SOCK_STREAM:
                raise refused(f"{what} is not a stream socket: the .socket unit needs ListenStream=")
            if sock.family not in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
                raise refused(f"{what} is neither TCP nor a Unix socket")
            if not listens:
                raise refused(f"{what} does not listen: the .socket unit needs Accept=no")
            sockets.append(sock)
        stack.pop_all()
    return sockets
