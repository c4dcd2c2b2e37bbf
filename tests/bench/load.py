"""The load of the acknowledgement bench, in a process of its own.

`load.py send BODY SECRET` reads lines `{"port", "first", "count", "connections"}` and
answers each with what it saw. Requests are built before the clock starts, so that
one loop over raw sockets is all that runs while it does. `load.py ceiling PORT` is a
server that does nothing, to tell how fast the loop itself can be.
"""

from __future__ import annotations

import collections
import hashlib
import hmac
import json
import re
import select
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: The issue number in the body that each request replaces by its own.
NUMBER = b"7654321"
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_WORD = re.compile(rb'"status": ?"(\w+)"')
_ANSWER = b"HTTP/1.1 202 Accepted\r\nContent-Length: 2\r\n\r\n{}"


def requests(body: bytes, secret: bytes, first: int, count: int) -> list[bytes]:
    """Signed deliveries of issues `first`, `first + 1` …, as they go over the wire."""
    return [
        request(body.replace(NUMBER, b"%07d" % number), secret, number)
        for number in range(first, first + count)
    ]


def request(body: bytes, secret: bytes, number: int) -> bytes:
    mac = hmac.new(secret, body, hashlib.sha256).hexdigest()
    head = (
        "POST /github HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\n"
        "User-Agent: GitHub-Hookshot/0000000\r\nContent-Type: application/json\r\n"
        f"X-GitHub-Event: issues\r\nX-GitHub-Delivery: {guid(number)}\r\n"
        "X-GitHub-Hook-ID: 100000001\r\n"
        "X-GitHub-Hook-Installation-Target-Type: repository\r\n"
        f"X-Hub-Signature-256: sha256={mac}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def guid(number: int) -> str:
    return f"{number:08x}-5e11-11ee-8c99-0242ac120002"


def whole(message: bytes) -> bool:
    """Whether a message is there to its end; of those with a length."""
    head = message.find(b"\r\n\r\n")
    if head < 0:
        return False
    length = _LENGTH.search(message, 0, head)
    return len(message) >= head + 4 + (int(length[1]) if length else 0)


@dataclass
class Load:
    """Requests on keep-alive connections, each with one on its way."""

    port: int
    waiting: list[bytes]
    connections: int
    took: list[float] = field(default_factory=list)
    answers: collections.Counter[str] = field(default_factory=collections.Counter)

    def run(self) -> dict[str, Any]:
        poll, self.sent, self.buffers = select.epoll(), {}, {}
        self.waiting.reverse()
        sockets = {}
        for _ in range(self.connections):
            made = socket.create_connection(("127.0.0.1", self.port))
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sockets[made.fileno()] = made
            poll.register(made, select.EPOLLIN)
        began = time.perf_counter()
        for made in sockets.values():
            self.send(made)
        while self.sent:
            for number, _ in poll.poll():
                self.receive(sockets[number])
        seconds = time.perf_counter() - began
        for made in sockets.values():
            made.close()
        return {"seconds": seconds, "took": self.took, "answers": self.answers}

    def send(self, to: socket.socket) -> None:
        if self.waiting:
            self.buffers[to] = b""
            self.sent[to] = time.perf_counter()
            to.sendall(self.waiting.pop())

    def receive(self, of: socket.socket) -> None:
        got = of.recv(65536)
        if not got:
            raise SystemExit(f"closed after {self.buffers[of]!r}")
        self.buffers[of] += got
        if whole(self.buffers[of]):
            self.took.append(time.perf_counter() - self.sent.pop(of))
            word = _WORD.search(self.buffers[of])
            status = self.buffers[of][9:12] + (b" " + word[1] if word else b"")
            self.answers[status.decode()] += 1
            self.send(of)


def send(body: bytes, secret: bytes) -> None:
    built: dict[tuple[int, int], list[bytes]] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        key = asked["first"], asked["count"]
        if key not in built:  # each server of a round gets the same bytes
            built = {key: requests(body, secret, *key)}
        load = Load(asked["port"], list(built[key]), asked["connections"])
        print(json.dumps(load.run()), flush=True)


def ceiling(port: int) -> None:
    poll, sockets, buffers = select.epoll(), {}, {}
    listening = socket.create_server(("127.0.0.1", port), backlog=128)
    poll.register(listening, select.EPOLLIN)
    while True:
        for number, _ in poll.poll():
            if number == listening.fileno():
                made, _ = listening.accept()
                sockets[made.fileno()], buffers[made.fileno()] = made, b""
                poll.register(made, select.EPOLLIN)
                continue
            got = sockets[number].recv(65536)
            buffers[number] += got
            if not got:
                poll.unregister(number)
                sockets.pop(number).close()
            elif whole(buffers[number]):
                buffers[number] = b""
                sockets[number].sendall(_ANSWER)


if __name__ == "__main__":
    if sys.argv[1] == "send":
        send(Path(sys.argv[2]).read_bytes(), sys.argv[3].encode())
    else:
        ceiling(int(sys.argv[2]))
