"""Listening sockets: their places, options that accepted connections inherit, and errors where none can be had."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from gateway.client import open_client
from gateway.client.connection import post
from gateway.config import Config, ListenConfig, OperatorConfig, TLSConfig
from gateway.config.problem import ConfigError
from gateway.gateway import Gateway
from gateway.net.listeners import CannotListen, Listener, Port, Rules, open_listeners

ANY = Port(number=0, setting="listen.port")
RULES = Rules(backlog=4)


@pytest.fixture
async def opened() -> AsyncIterator[Callable[..., list[Listener]]]:
    """`open_listeners`, which a test need not close."""
    with ExitStack() as stack:

        def opened(said: Any, ports: Any = (ANY,), rules: Rules = RULES, **environ: str) -> list[Listener]:
            listeners = open_listeners(said, ports, rules, environ)
            for listener in listeners:
                stack.callback(listener.close)
            return listeners

        yield opened


async def accepted(listener: Listener) -> socket.socket:
    found: list[socket.socket] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(listener.accept, found.append, lambda: not found)
        with trio.fail_after(60):
            while not found:
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    return found[0]


def refused(said: Any, ports: Any = (ANY,), rules: Rules = RULES, **environ: str) -> str:
    with pytest.raises(CannotListen) as caught:
        open_listeners(said, ports, rules, environ)
    return str(caught.value)


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="this system names the options otherwise")
@pytest.mark.parametrize(("keepalive", "said"), [(60.0, (1, 60, 15, 4)), (0.2, (1, 1, 15, 4)), (0.0, (0,))])
async def test_the_kernel_asks_whether_a_silent_client_is_still_there(
    opened: Callable[..., list[Listener]], keepalive: float, said: tuple[int, ...]
) -> None:
    (listener,) = opened("127.0.0.1", rules=Rules(backlog=1, keepalive=keepalive))
    with socket.create_connection(("127.0.0.1", listener.port)), closing(await accepted(listener)) as sock:
        options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE)]
        if keepalive:
            options += [(socket.IPPROTO_TCP, o) for o in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)]
        assert tuple(sock.getsockopt(*option) for option in options) == said


# ---- TCP ----

needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


@needs_ipv6
@pytest.mark.parametrize("client", ["127.0.0.1", "::1"])
async def test_every_address_is_that_of_ipv4_too(opened: Callable[..., list[Listener]], client: str) -> None:
    (listener,) = opened("::")
    assert listener.url == f"http://[::]:{listener.port}"
    with socket.create_connection((client, listener.port)), await accepted(listener):
        pass


@needs_ipv6
@pytest.mark.parametrize("said", [("127.0.0.1", "::"), ("::", "127.0.0.1"), ("0.0.0.0", "::")])
async def test_who_lists_an_ipv4_address_has_said_which(
    opened: Callable[..., list[Listener]], said: tuple[str, ...]
) -> None:
    one, other = opened(said)
    assert one.port == other.port
    assert {one.url, other.url} == {f"http://{'[::]' if host == '::' else host}:{one.port}" for host in said}


@pytest.mark.parametrize("said", [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "0.0.0.0")])
async def test_what_is_listed_beside_every_address_is_one_of_them(
    said: tuple[str, ...], opened: Callable[..., list[Listener]]
) -> None:
    (listener,) = opened(said)
    assert listener.url == f"http://0.0.0.0:{listener.port}"


@needs_ipv6
async def test_every_address_of_ipv6_does_not_stand_for_one_of_ipv4_that_is_listed(
    opened: Callable[..., list[Listener]],
) -> None:
    every, one = opened(("::1", "127.0.0.1", "::"))
    assert {every.url, one.url} == {f"http://127.0.0.1:{one.port}", f"http://[::]:{one.port}"}


@needs_ipv6
async def test_a_free_port_is_the_same_at_each_address_and_another_for_tls(opened: Callable[..., list[Listener]]) -> None:
    tls = Port(number=0, setting="listen.tls_port", tls=True)
    listeners = opened(["127.0.0.1", "::1"], [ANY, tls])
    clear, secure = listeners[0].port, listeners[2].port
    assert clear != secure
    assert [listener.url for listener in listeners] == [
        f"http://127.0.0.1:{clear}", f"http://[::1]:{clear}", f"https://127.0.0.1:{secure}", f"https://[::1]:{secure}",
    ]  # fmt: skip
    assert [(listener.tls, listener.setting) for listener in listeners[1:3]] == [
        (False, "listen.port"), (True, "listen.tls_port"),
    ]  # fmt: skip


async def test_a_free_port_that_is_taken_at_another_address_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, asked = socket.create_server, list[tuple[str, int]]()

    def create_server(address: tuple[str, int], **options: Any) -> socket.socket:
        asked.append(address)
        if len(asked) == 2:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        return begin(address, **options)

    monkeypatch.setattr("socket.create_server", create_server)
    one, other = open_listeners(["127.0.0.1", "127.0.0.2"], [ANY], RULES)
    with closing(one), closing(other):
        assert one.port == other.port == asked[3][1]
        assert [address for address, _ in asked] == ["127.0.0.1", "127.0.0.2"] * 2


async def test_a_name_is_listened_on_at_each_of_its_addresses(
    opened: Callable[..., list[Listener]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a Docker container without IPv6 has `localhost`: what is not there is left out, unless nothing is left."""
    addresses = [(socket.AF_INET6, "2001:db8::1"), (socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "127.0.0.2")]

    def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
        return [(family, socket.SOCK_STREAM, 6, "", (address, 0)) for family, address in addresses]

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    assert [listener.url.rpartition(":")[0] for listener in opened("here")] == ["http://127.0.0.1", "http://127.0.0.2"]
    del addresses[1:]
    assert refused("here").startswith("cannot listen on [2001:db8::1]:0: Cannot assign requested address; ")


async def test_a_port_in_use_names_the_address_and_the_setting_and_leaves_nothing_open(
    opened: Callable[..., list[Listener]],
) -> None:
    (listener,) = opened("127.0.0.2")
    port = Port(number=listener.port, setting="listen.bidi_port")
    assert refused(["127.0.0.1", "127.0.0.2"], [port]) == (
        f"cannot listen on 127.0.0.2:{listener.port}: Address already in use; listen.bidi_port sets another"
    )
    opened("127.0.0.1", [port])


@pytest.mark.parametrize("host", ["::", "::1"])
async def test_a_machine_without_ipv6_says_what_to_set(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = socket.socket

    def sock(family: int = socket.AF_INET, *rest: Any, **options: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return begin(family, *rest, **options)

    monkeypatch.setattr("socket.socket", sock)
    assert refused(host) == (
        f"cannot listen on [{host}]:0: Address family not supported by protocol; this machine has no IPv6: listen.host or "
        "--host sets an IPv4 address, 0.0.0.0 for every one"
    )


def test_the_errors_of_another_setting_name_that() -> None:
    rules = Rules(backlog=1, host_setting="operator.host")
    assert refused("192.0.2.1", rules=rules).endswith("; operator.host sets an address of this machine")


# ---- Unix sockets ----


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a path that is short enough."""
    return tmp_path_factory.mktemp("u")


async def test_a_unix_socket_has_its_mode_before_anybody_can_connect_and_is_gone_at_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, modes = folder / "s", list[int]()

    class Watched(socket.socket):
        def listen(self, *backlog: int) -> None:
            modes.append(stat.S_IMODE(path.stat().st_mode))
            super().listen(*backlog)

    monkeypatch.setattr("socket.socket", Watched)
    (listener,) = open_listeners(f"unix:{path}", [ANY], Rules(backlog=4, unix_mode=0o640))
    assert (listener.url, listener.port, listener.tls, modes) == (f"unix:{path}", 0, False, [0o640])
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        (await accepted(listener)).close()
    listener.close()
    assert not path.exists()
    listener.close()


async def test_a_socket_that_nobody_listens_on_is_replaced(folder: Path, opened: Callable[..., list[Listener]]) -> None:
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
        stale.listen()
    opened(f"unix:{path}")


@pytest.mark.parametrize("waiting", [0, 2])
async def test_a_socket_that_somebody_listens_on_stays(folder: Path, waiting: int) -> None:
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as theirs, ExitStack() as clients:
        theirs.bind(str(path))
        theirs.listen(0)
        for _ in range(waiting):  # no more than one has a place
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            client.connect_ex(str(path))
        assert refused(f"unix:{path}") == (
            f"cannot listen on unix:{path}: another process listens on it; listen.host or --host sets another path"
        )
        assert path.is_socket()


@pytest.mark.parametrize("kind", ["file", "folder", "link", "fifo"])
async def test_what_is_no_socket_stays(folder: Path, kind: str) -> None:
    path, target = folder / "s", folder / "target"
    target.write_text("data")
    {"file": path.touch, "folder": path.mkdir, "link": lambda: path.symlink_to(target), "fifo": lambda: os.mkfifo(path)}[
        kind
    ]()
    assert "a file that is not a socket is there: remove it; " in refused(f"unix:{path}")
    assert stat.S_IFMT(path.lstat().st_mode) != stat.S_IFSOCK
    assert target.read_text() == "data"


async def test_the_file_of_another_server_stays(folder: Path) -> None:
    """The other took its place: two were started at the same place, or an operator was quick."""
    path = folder / "s"
    (first,) = open_listeners(f"unix:{path}", [], RULES)
    path.unlink()
    (second,) = open_listeners(f"unix:{path}", [], RULES)
    first.close()
    assert path.is_socket()
    second.close()
    assert not path.exists()


async def test_what_is_wrong_with_a_path_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = folder / ("s" * 120)
    assert f"the path has {len(str(long))} bytes, and that of a Unix socket at most " in refused(f"unix:{long}")
    assert f"No such file or directory; make the folder {folder}/missing, or " in refused(f"unix:{folder}/missing/s")

    def bind(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("socket.socket.bind", bind)
    message = refused(f"unix:{folder}/s")
    assert f"Permission denied; the user of this process must be able to write to {folder}, or " in message


async def test_a_folder_need_not_be_readable(
    folder: Path, opened: Callable[..., list[Listener]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket can be made where one may write and enter: its lock, which needs more, is a help and no condition."""
    really = os.open

    def unreadable(path: Any, *rest: Any, **more: Any) -> int:
        if path == str(folder):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return really(path, *rest, **more)

    monkeypatch.setattr("os.open", unreadable)
    (listener,) = opened(f"unix:{folder}/s")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(f"{folder}/s")
        (await accepted(listener)).close()


async def test_what_fails_behind_a_unix_socket_removes_it(folder: Path) -> None:
    path = folder / "s"
    assert "LISTEN_FDS is not set" in refused([f"unix:{path}", "systemd"])
    assert not path.exists()


# ---- from systemd: tests/interop/test_listening.py has it as another program does it ----


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "no socket was passed, LISTEN_FDS is not set; start this program by its .socket unit"),
        ({"LISTEN_FDS": "1"}, "the sockets were passed to process (LISTEN_PID is not set), and this one is "),
        ({"LISTEN_FDS": "1", "LISTEN_PID": "1"}, "passed to process 1, and this one is "),
        ({"LISTEN_FDS": "x", "LISTEN_PID": "self"}, "LISTEN_FDS must be a number of sockets from 1 to 65535, not 'x'"),
        ({"LISTEN_FDS": "0", "LISTEN_PID": "self"}, "LISTEN_FDS must be a number of sockets from 1 to 65535, not '0'"),
        (
            {"LISTEN_FDS": "2", "LISTEN_PID": "self", "LISTEN_FDNAMES": "a:b"},
            "no socket of that name was passed, only 'a', 'b': FileDescriptorName= of the .socket unit sets it",
        ),
    ],
)
async def test_what_is_wrong_with_passed_sockets_says_what_to_do(environ: dict[str, str], message: str) -> None:
    environ = {name: str(os.getpid()) if value == "self" else value for name, value in environ.items()}
    said = refused("systemd:http", **environ)
    assert said.startswith("cannot listen on systemd:http (listen.host or --host): ")
    assert message in said


# ---- a gateway ----


async def test_a_passed_socket_of_another_family_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        try:
            sock = stack.enter_context(socket.socket(socket.AF_VSOCK))
            sock.bind((socket.VMADDR_CID_ANY, 0xFFFFFFFF))  # VMADDR_PORT_ANY
        except (AttributeError, OSError):
            pytest.skip("this machine has no other family of streams")
        sock.listen()
        monkeypatch.setattr("gateway.net.listening_sockets._FIRST_PASSED", sock.fileno())
        said = refused("systemd", LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
        assert said.endswith(f"descriptor {sock.fileno()} ('') is neither TCP nor a Unix socket")


async def test_a_gateway_tells_where_it_listens(folder: Path) -> None:
    listen = ListenConfig(host=("127.0.0.1", "127.0.0.2", f"unix:{folder}/s", f"unix+tls:{folder}/t"), port=0, tls_port=0)
    gateway = Gateway(Config(listen=listen, tls=TLSConfig(dev=True, dev_dir=str(folder / "tls"))))
    assert (gateway.port, gateway.addresses) == (0, ())
    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.serve)
        assert gateway.addresses == (
            f"http://127.0.0.1:{gateway.port}", f"http://127.0.0.2:{gateway.port}",
            f"https://127.0.0.1:{gateway.tls_port}", f"https://127.0.0.2:{gateway.tls_port}",
            f"unix:{folder}/s", f"unix+tls:{folder}/t",
        )  # fmt: skip
        for url in (f"http://127.0.0.2:{gateway.port}", f"unix:{folder}/s"):
            async with open_client(url) as client:
                await client.peer.send(*post(1, "/nowhere", b""))
                assert (await client.peer.read_answer(1))[0] == 404
        await gateway.drain()
    assert not (folder / "s").exists()
    assert not (folder / "t").exists()


def test_a_socket_with_tls_is_never_served_in_clear() -> None:
    with pytest.raises(ConfigError, match=r"listen\.host has a socket with TLS, and TLS is off"):
        Gateway(Config(listen=ListenConfig(host="unix+tls:/run/s")))


@pytest.mark.parametrize(
    ("listen", "operator"),
    [
        (("systemd", "systemd+tls:https"), "127.0.0.1"), (("systemd:http", "systemd+tls:http"), "127.0.0.1"),
        (("unix:/run/s", "unix+tls:/run/./s"), "127.0.0.1"), ("systemd", "systemd:plane"), ("systemd:http", "systemd"),
        ("unix:/run/s", "unix:/run/s"),
    ],
)  # fmt: skip
def test_no_socket_is_listened_on_twice(listen: Any, operator: str) -> None:
    """Chance would say who is served in clear and who with TLS, who calls models and who manages them."""
    config = Config(
        listen=ListenConfig(host=listen), operator=OperatorConfig(host=operator, open=True), tls=TLSConfig(dev=True)
    )
    with pytest.raises(ConfigError, match=r"listen\.host has .*, the same socket: each needs its own"):
        Gateway(config)


def test_sockets_of_other_names_may_stand_side_by_side() -> None:
    said = ("systemd:http", "systemd+tls:https", "unix:/run/s", "unix+tls:/run/t", "127.0.0.1")
    operator = OperatorConfig(host=("systemd:plane", "unix:/run/p", "127.0.0.1"), open=True)
    Gateway(Config(listen=ListenConfig(host=said), operator=operator, tls=TLSConfig(dev=True)))


async def test_one_that_is_closed_while_there_is_no_room_ends(autojump_clock: MockClock) -> None:
    (listener,) = open_listeners("127.0.0.1", [ANY], RULES)
    async with await trio.open_tcp_stream("127.0.0.1", listener.port), trio.open_nursery() as nursery:
        nursery.start_soon(listener.accept, lambda sock: None, lambda: False)
        await trio.sleep(1.05)  # in its pause
        listener.close()
