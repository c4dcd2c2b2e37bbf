"""A relay before the engine's socket, which loses, holds and cuts what a test names."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

#: What is done to a request, by its first line: None passes it on.
#:   lost  the engine obeys it, and the connection ends instead of its answer
#:   cut   the engine obeys it, and the connection ends within its answer's body
#:   held  the connection ends at once, and the engine hears of it after `let_go`
Fault = str | None
_FIRST = re.compile(rb"^(?:GET|POST|PUT|DELETE|HEAD) \S+ HTTP/1\.1\r\n")


@dataclass
class Relay:
    """Listens at `path` and passes on to `engine`."""

    path: Path
    engine: str = "/var/run/docker.sock"
    judge: Callable[[str], Fault] = lambda line: None
    #: While clear, nothing goes either way, as with an engine that hangs.
    flowing: threading.Event = field(default_factory=threading.Event)
    let_go: threading.Event = field(default_factory=threading.Event)
    _open: set[socket.socket] = field(default_factory=set)
    _listener: socket.socket | None = None

    def __post_init__(self) -> None:
        self.flowing.set()
        self.arrive()

    def arrive(self) -> None:
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(128)
        threading.Thread(target=self._accept, daemon=True).start()

    def leave(self) -> None:
        """Refuse whoever comes and drop who is there, as a stopped engine does."""
        assert self._listener
        self.path.unlink()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in tuple(self._open):
            _shut(end)

    def _accept(self) -> None:
        listener = self._listener
        assert listener
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(
                    target=self._relay, args=(client,), daemon=True
                ).start()

    def _relay(self, client: socket.socket) -> None:
        faults: list[str] = []
        with client, socket.socket(socket.AF_UNIX) as engine:
            self._open |= {client, engine}
            with contextlib.suppress(OSError):
                engine.connect(self.engine)
                back = threading.Thread(
                    target=self._back, args=(engine, client, faults), daemon=True
                )
                back.start()
                self._forth(client, engine, faults)
                back.join()
            self._open -= {client, engine}

    def _forth(
        self, client: socket.socket, engine: socket.socket, faults: list[str]
    ) -> None:
        with contextlib.suppress(OSError):
            while chunk := client.recv(65536):
                if _FIRST.match(chunk):
                    fault = self.judge(chunk.partition(b" HTTP/")[0].decode())
                    faults[:] = [fault] if fault else []
                if faults == ["held"]:
                    _shut(client)
                    self.let_go.wait()
                self.flowing.wait()
                engine.sendall(chunk)
            engine.shutdown(socket.SHUT_WR)
            return
        _shut(engine)

    def _back(
        self, engine: socket.socket, client: socket.socket, faults: list[str]
    ) -> None:
        with contextlib.suppress(OSError):
            while chunk := engine.recv(65536):
                self.flowing.wait()
                head = chunk.find(b"\r\n\r\n") + 4 if chunk[:5] == b"HTTP/" else 0
                if faults == ["cut"]:
                    client.sendall(chunk[: (head + len(chunk)) // 2])
                    if head < len(chunk):
                        break
                elif faults:
                    break
                else:
                    client.sendall(chunk)
        _shut(client)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
