"""The processes of these tests: `python -m tests.gateway.instances.child DESCRIPTOR PID NAME` does what NAME says."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import threading

from gateway.instances.spawn import bind_to_parent, limit_memory

MiB = 1024 * 1024
SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


def echo(peer: socket.socket) -> None:
    while data := peer.recv(4096):
        peer.sendall(data)


def tell(peer: socket.socket) -> None:
    """Sends its parent, group, session, the target of its stdin and its instance."""
    known = [os.getppid(), os.getpgid(0), os.getsid(0), os.readlink("/proc/self/fd/0"), os.environ["EVERYWIRE_INSTANCE"]]
    peer.sendall("\n".join(map(str, known)).encode())


def leave(peer: socket.socket) -> None:
    sys.exit(3)


def crash(peer: socket.socket) -> None:
    print("soon", file=sys.stderr)
    ctypes.memset(0, 0, 1)  # the line that is asserted


def crash_in_thread(peer: socket.socket) -> None:
    """Beside forty that rest, whose stacks are as deep as Trio's."""
    resting = threading.Event()
    for _ in range(40):
        threading.Thread(target=lambda: [[resting.wait() for _ in "a"] for _ in "b"], daemon=True).start()
    last = threading.Thread(target=crash, args=[peer])
    last.start()
    last.join()


def hold_the_interpreter(peer: socket.socket) -> None:
    peer.sendall(b"holds")
    ctypes.PyDLL(None).sleep(600)  # a PyDLL's call keeps the GIL


def have_children(peer: socket.socket) -> None:
    """One is a program, the other a fork; then it rests, or ends at a word."""
    program = subprocess.Popen(SLEEPER)
    forked = os.fork()
    if not forked:
        signal.pause()
    peer.sendall(f"{program.pid} {forked}".encode())
    if peer.recv(1):
        os._exit(0)


def end_children(peer: socket.socket) -> None:
    """SIGTERM does nothing to it, and ends those that it has started."""
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    program = subprocess.Popen(SLEEPER)
    forked = os.fork()
    if not forked:
        while True:
            signal.pause()
    program.terminate()
    os.kill(forked, signal.SIGTERM)
    codes = program.wait(), os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
    peer.sendall(repr(codes).encode())


def hand_output_on(peer: socket.socket) -> None:
    """One that leaves the group, and keeps stderr."""
    left = subprocess.Popen(SLEEPER, start_new_session=True)
    print("last words", file=sys.stderr)
    peer.sendall(str(left.pid).encode())


def say(peer: socket.socket) -> None:
    print("hello")  # told at once, though stdout is a pipe
    peer.recv(1)
    sys.stdout.buffer.write("€".encode() * 5000 + b"\n\n1 %\r2 %\r\n\xff\xfe")
    sys.stdout.buffer.flush()
    print("a mistake", file=sys.stderr)


def flood(peer: socket.socket) -> None:
    for _ in range(50):
        os.write(1, b"x\n" * 10_000)
    peer.sendall(b"said")
    peer.recv(1)


def flood_of_one_line(peer: socket.socket) -> None:
    for _ in range(50):
        os.write(1, b"x" * 100_000)


def allocate(peer: socket.socket) -> None:
    limit_memory(512 * MiB)
    bytearray(16 * MiB)
    try:
        bytearray(1024 * MiB)
    except MemoryError:
        peer.sendall(b"MemoryError")


def middle(peer: socket.socket) -> None:
    """Starts one that holds the interpreter, and tells its pid."""
    from gateway.instances.spawn import Process, ProcessPlan

    process = Process.start(ProcessPlan(name="m", number=1, module=__spec__.name), "hold_the_interpreter")
    process.socket.setblocking(True)
    assert process.socket.recv(5) == b"holds"
    peer.sendall(str(process.pid).encode())
    signal.pause()


def main() -> None:
    descriptor, parent, name = sys.argv[1:]
    bind_to_parent(int(parent))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=int(descriptor)) as peer:
        globals()[name](peer)


if __name__ == "__main__":
    main()
