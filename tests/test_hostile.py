"""Hostile and broken clients against the service's own process, over real sockets.

`pidispatch serve` runs as it does for an operator; an honest client goes on delivering
while others misbehave. What the process holds is read from /proc.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_intake import SECRET, issue, post, request, rule, until

from pidispatch import MAX_BODY_BYTES

ROOT = Path(__file__).resolve().parent.parent
HEALTH = b"GET /healthz HTTP/1.1\r\n\r\n"
POST = b"POST /github HTTP/1.1"
JSON = b"Content-Type: application/json"
#: Distinct items and ids, so that no delivery is another's duplicate.
COUNT = itertools.count(1)


class Server:
    """`pidispatch serve --no-worker` in a process of its own."""

    def __init__(self, root: Path, files: int | None = None) -> None:
        rules = [rule({"type": "label", "any": ["pi:fix"]})]
        (root / "triggers.json").write_text(json.dumps({"triggers": rules}))
        (root / ".git").mkdir()
        (root / ".git/HEAD").write_text("ref: refs/heads/main\n")
        ours = {"WEBHOOK_SECRET": SECRET, "PI_BIND": "127.0.0.1", "PI_PORT": "0"}
        ours |= {"PI_PANEL_PORT": "0", "XDG_DATA_HOME": str(root / "data")}
        ours |= {"FORGEJO_URL": "http://127.0.0.1:9", "FORGEJO_TOKEN": "t0ken"}
        ours |= {"FORGEJO_WEBHOOK_SECRET": SECRET}
        self.errors = root / "stderr"
        argv = [sys.executable, str(ROOT / "pidispatch.py"), "serve", "--no-worker"]
        with self.errors.open("wb") as sink:
            self.process = subprocess.Popen(
                argv,
                cwd=root,
                env={**os.environ, **ours},
                stderr=sink,
                preexec_fn=lambda: _few_files(files),
            )
        assert until(lambda: "panel on" in self.told()), self.told()
        found = re.search(r"listening on .*:(\d+)", self.told())
        assert found
        self.port = int(found[1])

    def told(self) -> str:
        return self.errors.read_text(errors="replace")

    def status(self, name: str) -> int:
        """A number of /proc/PID/status; of sizes, in kB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"^{name}:\s+(\d+)", text, re.M)[1])  # type: ignore[index]

    def files(self, kind: str = "") -> int:
        """How many files it has open, or sockets alone."""
        found = 0
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found += str(link.readlink()).startswith(kind)
        return found

    def cpu(self) -> float:
        """Seconds of CPU so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2]
        user, system = fields.split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(20) == 0, self.told()
        finally:
            self.process.kill()
        assert "request-failed" not in self.told()


def _few_files(files: int | None) -> None:
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server"))
    yield made
    made.end()


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """The one server; whatever a test does, nothing of it may stay there."""
    assert answers(shared, HEALTH) == [200]
    assert until(lambda: at_rest(shared))
    sockets = shared.files("socket:")
    yield shared
    assert answers(shared, HEALTH) == [200]
    assert until(lambda: at_rest(shared) and shared.files("socket:") == sockets)
    assert shared.status("Threads") < 256 + 30


def at_rest(server: Server) -> bool:
    """Whether no connection is left on it, nor one that waits to be closed."""
    ours = f":{server.port:04X}"
    rows = Path("/proc/net/tcp").read_text().split("\n")[1:-1]
    fields = [row.split() for row in rows]
    return not [f for f in fields if f[1].endswith(ours) and f[3] in ("01", "08")]


def delivery(label: str = "pi:fix") -> bytes:
    """A signed delivery of its own that starts one job."""
    n = next(COUNT)
    body = json.dumps(issue("labeled", label, number=n)).encode()
    return post(body, event="issues", guid=f"honest-{n}", Connection="close")


def read_all(sock: socket.socket) -> list[tuple[int, dict[str, Any]]]:
    """Every answer until the other side ends."""
    found = []
    with sock.makefile("rb") as file:
        while line := file.readline():
            length = 0
            while (head := file.readline().strip()) != b"":
                name, _, value = head.lower().partition(b": ")
                length = int(value) if name == b"content-length" else length
            status = int(line.split(b" ")[1])
            body = json.loads(file.read(length)) if status != 100 else {}
            found.append((status, body))
    return found


def answers(server: Server, data: bytes) -> list[int]:
    """The statuses of all answers to these bytes, after which our side has ended."""
    with server.connect() as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        return [status for status, _ in read_all(sock)]


class Honest(threading.Thread):
    """Delivers, one connection each, until stopped; keeps how long each took."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.took: list[float] = []
        self.failed: list[str] = []
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.02):
            began = time.monotonic()
            try:
                with self.server.connect() as sock:
                    sock.sendall(delivery())
                    [(status, body)] = read_all(sock)
                    if (status, body["status"]) != (202, "queued"):
                        self.failed.append(f"{status} {body}")
            except (OSError, ValueError) as error:
                self.failed.append(repr(error))
            self.took.append(time.monotonic() - began)

    def __enter__(self) -> Honest:
        self.start()
        assert until(lambda: self.took)
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.join(60)

    def within(self, seconds: float, what: str) -> None:
        """All were served, none later than that, and the report says how soon."""
        took = sorted(self.took)
        p50, p99 = took[len(took) // 2], took[int(len(took) * 0.99)]
        print(
            f"{what}: {len(took)} honest deliveries, median {p50 * 1e3:.1f} ms,", end=""
        )
        print(f" p99 {p99 * 1e3:.1f} ms, slowest {took[-1] * 1e3:.1f} ms")
        assert not self.failed, self.failed[:3]
        assert len(took) > 5 and took[-1] < seconds, took[-3:]


# -- one client that is wrong -------------------------------------------------------

SMUGGLED = delivery()
LENGTHS = {
    b"Content-Length: " + b"9" * 30: 413,
    b"Content-Length: 18446744073709551618": 413,
    b"Content-Length: 4294967298": 413,
    b"Content-Length: 2 2": 400,
    b"Content-Length: 2;": 400,
    b"Content-Length: 2.0": 400,
    b"Content-Length: 2e0": 400,
    b"Content-Length: -0": 400,
    b"Content-Length: \xd9\xa2": 400,
    b"Content-Length: \xef\xbc\x92": 400,
    b"Content-Length: \xa02": 400,
    b"Content-Length:\x0b2": 400,
    b"Content-Length\t: 2": 400,
    b"Content-Length: 2\r\nContent-Length: 2": 400,
    b"Content-Length: 2\r\nContent-length:": 400,
    b"Content_Length: 2": 411,
}


@pytest.mark.parametrize("line", LENGTHS, ids=repr)
def test_a_length_is_plain_digits_once(server: Server, line: bytes) -> None:
    head = b"\r\n".join([POST, JSON, line, b"", b""])
    assert answers(server, head + b"{}" + SMUGGLED) == [LENGTHS[line]]


def test_a_length_may_be_padded_and_begin_with_zeros(server: Server) -> None:
    """Both are valid HTTP, and every reader takes them for the same number."""
    for said in ("\t 2 \t", "0000000002"):
        assert answers(server, post(Content_Length=said) + HEALTH) == [200, 200]


TRANSFERS = [
    b"Transfer-Encoding: chunked",
    b"transfer-encoding:chunked",
    b"Transfer-Encoding: identity",
    b"Transfer-Encoding:",
    b"Transfer-Encoding: xchunked",
    b"Transfer-Encoding: chunked, identity",
    b"Transfer-Encoding: gzip, chunked",
]
BROKEN = [
    b"Transfer-Encoding : chunked",
    b"Transfer-Encoding:\x0bchunked",
    b"X: y\nTransfer-Encoding: chunked",
    b"X: y\rTransfer-Encoding: chunked",
    b"X: y\r\n Transfer-Encoding: chunked",
    b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked",
    b"\x00Transfer-Encoding: chunked",
    b"\xa0Transfer-Encoding: chunked",
]


@pytest.mark.parametrize("line", TRANSFERS + BROKEN, ids=repr)
def test_what_two_readers_could_cut_differently_is_read_by_none(
    server: Server, line: bytes
) -> None:
    """Request smuggling: by length one request, by chunks two, or the reverse."""
    wanted = 411 if line in TRANSFERS else 400
    for length in (b"Content-Length: %d" % (5 + len(SMUGGLED)), b"Content-Length: 5"):
        for order in ((line, length), (length, line)):
            head = b"\r\n".join([POST, JSON, *order, b"", b""])
            assert answers(server, head + b"0\r\n\r\n" + SMUGGLED) == [wanted]
    health = HEALTH.replace(b"\r\n\r\n", b"\r\n" + line + b"\r\n\r\n")
    assert answers(server, health + SMUGGLED) == [200 if line in TRANSFERS else 400]


@pytest.mark.parametrize("n", [2, 10, 50])
def test_requests_in_one_write_are_answered_in_order(server: Server, n: int) -> None:
    each = [delivery().replace(b"Connection: close\r\n", b"") for _ in range(n)]
    guids = [re.search(rb"honest-\d+", data)[0].decode() for data in each]  # type: ignore[index]
    with server.connect() as sock:
        sock.sendall(b"".join(each))
        sock.shutdown(socket.SHUT_WR)
        said = read_all(sock)
    assert said == [
        (202, {"status": "queued", "jobs": [f"gh-{guid}"]}) for guid in guids
    ]


def test_who_has_said_all_is_answered_all_the_same(server: Server) -> None:
    """Half-closed: after nothing, within a request, and after one."""
    assert answers(server, b"") in ([], [400])
    data = delivery()
    assert answers(server, data[:1]) == [501], "P is no method"
    for size in (40, len(data) // 2, len(data) - 1):
        assert answers(server, data[:size]) == [400]
    assert answers(server, data) == [202]


BODIES = {
    "invalid UTF-8": b'{"a": "\xff\xfe"}',
    "UTF-16": '{"a": "b"}'.encode("utf-16"),
    "100,000 brackets": b"[" * 100_000,
    "100,000 closed brackets": b"[" * 100_000 + b"]" * 100_000,
    "100,000 objects": b'{"action":' * 100_000 + b"1" + b"}" * 100_000,
    "half a surrogate pair": b'{"action": "\\ud800"}',
    "NaN": b'{"a": NaN}',
    "a number without end": b'{"a": ' + b"9" * 100_000,
    "two values": b"{}{}",
    "nothing": b"",
    "a NUL": b"{}\0",
}


@pytest.mark.parametrize("name", BODIES)
def test_a_signed_body_that_is_not_json_is_400(server: Server, name: str) -> None:
    data = post(BODIES[name], event="issues")
    with Honest(server) as honest:
        assert answers(server, data * 5) == [400]
        assert until(lambda: len(honest.took) > 12)
    honest.within(2.0, name)


def test_of_a_key_that_stands_twice_the_last_counts(server: Server) -> None:
    """As with every JSON reader that GitHub's own senders and receivers use."""
    n = next(COUNT)
    shape = json.dumps(issue("labeled", "pi:fix", number=n))
    for action, status in (("labeled", 202), ("edited", 200)):
        body = f'{shape[:-1]}, "action": {json.dumps(action)}}}'.encode()
        data = post(body, event="issues", guid=f"twice-{n}-{action}")
        assert answers(server, data) == [status]


def flood(start: bytes, piece: bytes) -> Callable[[socket.socket], None]:
    """Sends pieces until nobody takes them, 8 MiB at most."""

    def send(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.sendall(start)
            for _ in range(128):
                sock.sendall(piece * (65_536 // len(piece)))

    return send


FLOODS = {
    "headers": (flood(POST + b"\r\n", b"X: y\r\n"), 431),
    "one header": (flood(POST + b"\r\nX: ", b"y"), 431),
    "one name": (flood(POST + b"\r\n", b"y"), 431),
    "folded lines": (flood(POST + b"\r\nX: y\r\n", b" y\r\n"), 400),
    "bare line feeds": (flood(POST + b"\r\n", b"X: y\n"), 400),
    "bare returns": (flood(POST + b"\r\n", b"X: y\r"), 431),
    "NULs": (flood(POST + b"\r\n", b"\0"), 431),
    "a request line": (flood(b"POST /", b"y"), 414),
    "empty lines": (flood(b"", b"\r\n"), 400),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_headers_is_cut_off_and_takes_no_memory(
    server: Server, name: str
) -> None:
    send, wanted = FLOODS[name]
    held = server.status("VmHWM")
    with server.connect() as sock:
        sender = threading.Thread(target=send, args=(sock,))
        sender.start()
        try:
            [(status, _)] = read_all(sock)
            assert status == wanted
        finally:
            sock.shutdown(socket.SHUT_RDWR)
            sender.join(30)
    assert server.status("VmHWM") - held < 8_192


# -- sizes --------------------------------------------------------------------------


def padded(size: int) -> bytes:
    """A delivery for us whose body has exactly that many bytes."""
    n = next(COUNT)
    body = json.dumps(issue("labeled", "pi:fix", number=n)).encode()
    body += b" " * (size - len(body))
    return post(body, event="issues", guid=f"big-{n}", Connection="close")


def test_25_mib_are_taken_and_one_byte_more_is_refused_before_it_comes(
    server: Server,
) -> None:
    assert answers(server, padded(MAX_BODY_BYTES)) == [202]
    held = server.status("VmHWM")
    head = request(POST, JSON, b"Content-Length: %d" % (MAX_BODY_BYTES + 1))
    with server.connect() as sock:
        sock.sendall(head)
        sock.settimeout(2)
        assert read_all(sock) == [(413, {"status": "error", "reason": "too-large"})]
    assert server.status("VmHWM") - held < 4_096


def test_a_strangers_form_takes_no_more_than_its_size(server: Server) -> None:
    """A form of escapes is unpacked before its signature can be checked."""
    form = b"payload=" + b"%41" * (8 * 2**20 // 3)
    length = b"Content-Length: %d" % len(form)
    kind = b"Content-Type: application/x-www-form-urlencoded"
    mac = b"X-Forgejo-Signature: " + b"0" * 64
    held = server.status("VmHWM")
    data = request(b"POST /forgejo HTTP/1.1", kind, length, mac) + form
    assert answers(server, data) == [401]
    grown = (server.status("VmHWM") - held) / 1024
    print(f"a form of 8 MiB of escapes: {grown:.0f} MiB")
    assert grown < 4 * 8


def test_40_bodies_of_25_mib_at_once_are_taken_in_bounded_memory(
    server: Server,
) -> None:
    """At most 16 are held at a time; the rest wait in the kernel."""
    each = [padded(MAX_BODY_BYTES) for _ in range(2)]
    found: list[list[int]] = []

    def send(n: int) -> None:
        guid = b"big-%d-" % n
        found.append(answers(server, each[n % 2].replace(b"big-", guid, 1)))

    with Honest(server) as honest:
        senders = [threading.Thread(target=send, args=(n,)) for n in range(40)]
        began = time.monotonic()
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join(60)
        took = time.monotonic() - began
    peak = server.status("VmHWM") / 1024
    left = server.status("VmRSS") / 1024
    print(f"40 bodies: {took:.1f} s, VmHWM {peak:.0f} MiB, then {left:.0f} MiB")
    assert sorted(found) == [[200]] * 38 + [[202]] * 2, "two bodies, 38 times again"
    honest.within(5.0, "40 bodies of 25 MiB")
    assert peak < 16 * 25 + 250
    assert left < 250, "it is given back"


# -- many clients that are wrong ------------------------------------------------------


@contextlib.contextmanager
def crowd(server: Server, n: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(server.connect()) for _ in range(n)]


def trickle(socks: list[socket.socket], until_: float) -> None:
    """One byte of a header to each, again and again."""
    while time.monotonic() < until_:
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.send(b"y", socket.MSG_DONTWAIT)
        time.sleep(0.2)


def deafen(sock: socket.socket) -> None:
    """Ask for more answers than fit on the way, and read none."""
    sock.setblocking(False)
    full = 0
    while full < 10:
        try:
            sock.send(HEALTH * 100)
        except BlockingIOError:
            full += 1
            time.sleep(0.02)


def calm(server: Server) -> bool:
    """Whether it has nothing to do."""
    spent = server.cpu()
    time.sleep(0.2)
    return server.cpu() - spent < 0.05


def test_200_slow_clients_hold_nobody_up_and_are_let_go(server: Server) -> None:
    """Slow in their headers, in their bodies, and in reading what they asked for."""
    with crowd(server, 200) as slow:
        heads, bodies, deaf = slow[:120], slow[120:197], slow[197:]
        for sock in deaf:
            deafen(sock)
        for sock in heads:
            sock.sendall(POST + b"\r\nX: ")
        for sock in bodies:
            sock.sendall(request(POST, JSON, b"Content-Length: 1000") + b"{")
        end = time.monotonic() + 10.5
        assert until(lambda: calm(server))
        with Honest(server) as honest:
            trickle(heads + bodies, end)
            said = [read_all(sock) for sock in heads]
        assert said == [[(408, {"status": "error", "reason": "timeout"})]] * 120
        assert not select.select(bodies, [], [], 0)[0], "a body has 30 s"
    honest.within(1.0, "200 slow clients")


def test_connections_that_are_kept_give_way(server: Server) -> None:
    with contextlib.ExitStack() as stack, Honest(server) as honest:
        for _ in range(300):
            kept = stack.enter_context(server.connect())
            kept.sendall(HEALTH)
            assert kept.recv(4_096).startswith(b"HTTP/1.1 200")
        assert until(lambda: len(honest.took) > 20)
    honest.within(2.0, "300 kept connections")


def test_connections_that_never_spoke_give_way(server: Server) -> None:
    with crowd(server, 300), Honest(server) as honest:
        until(lambda: len(honest.took) > 20, 12)
    honest.within(2.0, "300 silent connections")


def test_a_storm_of_resets_leaves_nothing(server: Server) -> None:
    data = delivery()
    now = struct.pack("ii", 1, 0)  # closing sends a reset, whatever is on its way
    with Honest(server) as honest:
        for n in range(3_000):
            with server.connect() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
                sock.sendall(data[: n % len(data)])
    honest.within(2.0, "3,000 resets")


def test_without_a_file_to_accept_with_the_server_waits_and_goes_on(
    tmp_path: Path,
) -> None:
    """Neither dies nor spins; SQLite keeps what it had opened before."""
    server = Server(tmp_path, files=64)
    try:
        assert answers(server, delivery()) == [202]
        with crowd(server, 120):
            assert until(lambda: "Too many open files" in server.told())
            spent, began = server.cpu(), time.monotonic()
            time.sleep(1.0)
            used = (server.cpu() - spent) / (time.monotonic() - began)
            print(f"without a free file: {used:.0%} of a CPU")
            assert used < 0.5
        assert until(lambda: answers(server, delivery()) == [202])
    finally:
        server.end()
