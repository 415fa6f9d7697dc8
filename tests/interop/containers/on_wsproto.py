"""A container on wsproto, in threads: one loop takes events in their order, so that a Close is answered behind all else."""

import socketserver
import sys
import time

from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, CloseConnection, Message, Ping, Request

PING = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Session(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        head = b""
        while b"\r\n\r\n" not in head and (more := self.request.recv(65536)):
            head += more
        if head.startswith(b"GET /ping "):
            self.request.sendall(PING)
            return
        machine = WSConnection(ConnectionType.SERVER)
        machine.receive_data(head)
        while True:
            for event in machine.events():
                match event:
                    case Request():
                        self.request.sendall(machine.send(AcceptConnection()))
                    case Message():
                        time.sleep(0.1)  # a model that thinks
                        self.request.sendall(machine.send(Message(data=event.data, message_finished=event.message_finished)))
                    case Ping():
                        self.request.sendall(machine.send(event.response()))
                    case CloseConnection():
                        self.request.sendall(machine.send(event.response()))
                        return
            if not (data := self.request.recv(65536)):
                return
            machine.receive_data(data)


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True


if __name__ == "__main__":
    with Server(("127.0.0.1", int(sys.argv[1])), Session) as server:
        print(f"listening {server.server_address[1]}", flush=True)
        server.serve_forever()
