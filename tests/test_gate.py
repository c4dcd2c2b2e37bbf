"""The gate: what it lets through, what it refuses, what it counts and what it says.

Most tests run a gate and a small scripted provider in one event loop on loopback; a few
run gate.py as the process that it is in a box.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import datetime
import importlib.util
import ipaddress
import itertools
import json
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SOURCE = Path(__file__).parent.parent / "image" / "gate.py"
TOKEN = "job-token-Canary1-7f3a"
KEY = "sk-real-Canary2-91bc"
SECRET_TEXT = "body-Canary3-55de"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("gate", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gate"] = module
    spec.loader.exec_module(module)
    return module


gate = load()
TRUST = ssl.create_default_context()

# ------------------------------------------------------------------ provider and box


@dataclass
class Seen:
    """One request as the provider got it."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]


Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def answer(
    body: bytes, status: str = "200 OK", kind: str = "application/json"
) -> Answer:
    """A whole answer with a length."""

    async def give(writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    return give


def stream(*pieces: bytes) -> Answer:
    """A chunked event stream, a chunk a piece."""

    async def give(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for piece in pieces:
            writer.write(chunk(piece))
        writer.write(b"0\r\n\r\n")

    return give


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


def event(data: object, name: str = "") -> bytes:
    return (f"event: {name}\n" if name else "").encode() + (
        f"data: {json.dumps(data)}\n\n".encode()
    )


@dataclass
class Provider:
    """A server that keeps what it is asked and answers by script."""

    give: Answer
    seen: list[Seen] = field(default_factory=list)
    port: int = 0

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError, EOFError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            line, *fields = head[:-4].split("\r\n")
            pairs = [tuple(text.split(": ", 1)) for text in fields]
            seen = Seen(line, [(pair[0], pair[1]) for pair in pairs], b"")
            for length in seen.values("content-length"):
                seen.body = await reader.readexactly(int(length))
            self.seen.append(seen)
            await self.give(writer)
            await writer.drain()
        writer.close()


@dataclass
class Answered:
    """One answer as the box got it; `whole` is False when it broke off."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool = True

    @property
    def error(self) -> Any:
        return json.loads(self.body)["error"]["type"]


def parse_answer(raw: bytes) -> Answered:
    head, _, rest = raw.partition(b"\r\n\r\n")
    line, *fields = head.decode("latin-1").split("\r\n")
    headers = {k.lower(): v for k, v in (text.split(": ", 1) for text in fields)}
    status = int(line.split(" ")[1])
    if headers.get("transfer-encoding") == "chunked":
        body, whole = b"", False
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            if int(size, 16) == 0:
                whole = rest == b"\r\n"
                break
            body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        return Answered(status, headers, body, whole)
    length = int(headers.get("content-length", len(rest)))
    return Answered(status, headers, rest, len(rest) == length)


@dataclass
class Setting:
    """A running gate, its provider, and every line it wrote."""

    provider: Provider
    port: int
    lines: list[dict[str, Any]]
    gate: Any

    async def raw(self, request: bytes) -> Answered:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        try:
            return parse_answer(await reader.read())
        finally:
            writer.close()

    async def ask(
        self,
        path: str = "/v1/chat/completions",
        body: object = None,
        method: str = "POST",
        headers: dict[str, str] | None = None,
        raw: bytes | None = None,
    ) -> Answered:
        text = raw if raw is not None else json.dumps(body or {"model": "m"}).encode()
        given = {"authorization": f"Bearer {TOKEN}"} if headers is None else headers
        if method == "POST":
            given = {"content-length": str(len(text)), **given}
        return await self.raw(self.head(method, path, given) + text * (method != "GET"))

    def head(self, method: str, path: str, headers: dict[str, str]) -> bytes:
        target = f"/127.0.0.1:{self.provider.port}{path}"
        fields = {"host": "gate:8080", **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == kind]

    async def booked(self, calls: int = 1) -> dict[str, Any]:
        """The last call line once there are so many."""
        while len(self.of("call")) < calls:
            await asyncio.sleep(0.001)
        return self.of("call")[-1]


STYLE_PATHS = {
    "anthropic-messages": ("", "/v1/messages"),
    "openai-completions": ("/v1", "/v1/chat/completions"),
    "openai-responses": ("/v1", "/v1/responses"),
    "google-generative-ai": ("/v1beta", "/v1beta/models/m:streamGenerateContent"),
    "mistral-conversations": ("", "/v1/chat/completions"),
}
HEADERS = {"anthropic-messages": "x-api-key", "google-generative-ai": "x-goog-api-key"}


def terms_line(port: int, style: str, **changes: Any) -> bytes:
    provider = {
        "baseUrl": f"http://127.0.0.1:{port}{STYLE_PATHS[style][0]}",
        "style": style,
        "authHeader": HEADERS.get(style, "authorization"),
        "authPrefix": "" if style in HEADERS else "Bearer ",
        "key": KEY,
    }
    terms = {
        "token": TOKEN,
        "providers": {"p": provider},
        "allow": [],
        "models": ["p/m"],
        "prices": {},
        "budget": None,
        "spent": 0,
    }
    return json.dumps({**terms, **changes}).encode() + b"\n"


@contextlib.asynccontextmanager
async def running(
    give: Answer = answer(b"{}"),  # noqa: B008
    style: str = "openai-completions",
    limits: Any = None,
    resolve: Any = None,
    **changes: Any,
) -> AsyncIterator[Setting]:
    provider = Provider(give)
    server = await asyncio.start_server(provider.serve, "127.0.0.1", 0)
    provider.port = server.sockets[0].getsockname()[1]
    terms = gate.read_terms(terms_line(provider.port, style, **changes))
    lines: list[dict[str, Any]] = []
    server_of_job = gate.Gate(
        terms,
        lines.append,
        limits or gate.Limits(linger=0.05),
        resolve or gate.resolve,
        TRUST,
    )
    port = await server_of_job.start("127.0.0.1", 0)
    try:
        yield Setting(provider, port, lines, server_of_job)
    finally:
        await server_of_job.stop()
        server.close()


def go(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await test

    asyncio.run(bounded())


# ---------------------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {TOKEN}"},
        {"authorization": f"bearer {TOKEN}"},
        {"x-api-key": TOKEN},
        {"x-goog-api-key": TOKEN},
        {"api-key": TOKEN},
    ],
)
def test_the_token_counts_in_any_header_where_a_client_puts_its_key(
    headers: dict[str, str],
) -> None:
    async def test() -> None:
        async with running() as it:
            assert (await it.ask(headers=headers)).status == 200
            assert it.provider.seen[0].values("authorization") == [f"Bearer {KEY}"]
            assert TOKEN not in str(it.provider.seen)

    go(test())


def test_the_token_counts_as_a_query_parameter_and_is_taken_out_of_the_query() -> None:
    async def test() -> None:
        async with running(style="google-generative-ai") as it:
            path = f"/v1beta/models/m:streamGenerateContent?alt=sse&key={TOKEN}&%6bey=x"
            assert (await it.ask(path, {"contents": []}, headers={})).status == 200
            line = it.provider.seen[0].line
            assert line == (
                "POST /v1beta/models/m:streamGenerateContent?alt=sse HTTP/1.1"
            )
            assert it.provider.seen[0].values("x-goog-api-key") == [KEY]

    go(test())


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": f"Bearer {TOKEN}x"},
        {"authorization": "Bearer "},
        {"authorization": TOKEN[:-1]},
        {"x-other": TOKEN},
        {"x-api-key": "\xe9\xff"},
    ],
)
def test_without_the_token_nothing_is_asked_of_the_provider(
    headers: dict[str, str],
) -> None:
    async def test() -> None:
        async with running() as it:
            got = await it.ask(headers=headers)
            assert (got.status, got.error) == (403, "pidispatch_token")
            assert it.of("refused") == [
                {"event": "refused", "reason": "token", "host": None}
            ]
            assert not it.provider.seen

    go(test())


def test_a_box_cannot_add_credentials_of_its_own_beside_the_real_key() -> None:
    async def test() -> None:
        async with running(style="anthropic-messages") as it:
            own = {
                "x-api-key": TOKEN,
                "authorization": "Bearer theirs",
                "cookie": "session=theirs",
                "proxy-authorization": "Basic theirs",
                "x-goog-api-key": "theirs",
            }
            assert (await it.ask("/v1/messages", headers=own)).status == 200
            seen = it.provider.seen[0]
            assert seen.values("x-api-key") == [KEY]
            assert "theirs" not in str(seen)

    go(test())


# -------------------------------------------------------------- paths, methods, models


@pytest.mark.parametrize("style", STYLE_PATHS)
def test_every_style_has_its_completion_path_and_its_model_list(style: str) -> None:
    async def test() -> None:
        base, path = STYLE_PATHS[style]
        async with running(style=style) as it:
            assert (await it.ask(path)).status == 200
            models = base + ("/models" if base else "/v1/models")
            assert (await it.ask(models, method="GET")).status == 200
            lines = [seen.line for seen in it.provider.seen]
            assert lines == [f"POST {path} HTTP/1.1", f"GET {models} HTTP/1.1"]
            assert [line["n"] for line in it.of("call")] == [1]

    go(test())


@pytest.mark.parametrize(
    ("style", "method", "path", "reason"),
    [
        ("openai-completions", "POST", "/v1/batches", "path"),
        ("openai-completions", "POST", "/v1/files", "path"),
        ("openai-completions", "POST", "/v1/responses", "path"),
        ("openai-completions", "POST", "/v1/chat/completions/", "path"),
        ("openai-completions", "POST", "/v1//chat/completions", "path"),
        ("openai-completions", "POST", "/v1/x/../chat/completions", "path"),
        ("openai-completions", "POST", "/v1/chat/completions/../../files", "path"),
        ("openai-completions", "POST", "/v1/chat%2Fcompletions", "path"),
        ("openai-completions", "POST", "/chat/completions", "path"),
        ("openai-completions", "GET", "/v1/models/m", "path"),
        ("openai-completions", "GET", "/v1/chat/completions", "method"),
        ("openai-completions", "POST", "/v1/models", "method"),
        ("openai-completions", "DELETE", "/v1/models", "method"),
        ("openai-completions", "PUT", "/v1/chat/completions", "method"),
        ("openai-responses", "GET", "/v1/responses/resp_1", "path"),
        ("anthropic-messages", "POST", "/v1/messages/batches", "path"),
        ("anthropic-messages", "POST", "/v1/messages/count_tokens", "path"),
        ("mistral-conversations", "POST", "/v1/conversations", "path"),
        ("google-generative-ai", "POST", "/v1beta/models/m:batchGenerate", "path"),
        ("google-generative-ai", "POST", "/v1beta/cachedContents", "path"),
        ("google-generative-ai", "POST", "/v1beta/models/:generateContent", "path"),
        ("google-generative-ai", "POST", "/v1beta/models/x:generateContent", "model"),
        ("google-generative-ai", "POST", "/v1beta/models/m/x:generateContent", "model"),
    ],
)
def test_anything_beside_completions_and_the_model_list_is_refused(
    style: str, method: str, path: str, reason: str
) -> None:
    async def test() -> None:
        async with running(style=style) as it:
            got = await it.ask(path, method=method)
            assert got.status == 403
            assert [line["reason"] for line in it.of("refused")] == [reason]
            assert not it.provider.seen

    go(test())


def test_a_host_that_is_no_provider_is_refused() -> None:
    async def test() -> None:
        async with running() as it:
            token = f"authorization: Bearer {TOKEN}\r\ncontent-length: 2\r\n\r\n{{}}"
            for target in ("/evil.example/v1/chat/completions", "/", "/v1/x"):
                got = await it.raw(f"POST {target} HTTP/1.1\r\n{token}".encode())
                assert (got.status, got.error) == (403, "pidispatch_path")
            assert not it.provider.seen

    go(test())


@pytest.mark.parametrize(
    "body",
    [
        {"model": "dear"},
        {"model": "M"},
        {"model": None},
        {"model": ["m"]},
        {"messages": []},
        {"model": "m", "models": ["m", "dear"]},
        {"model": "m", "models": "dear"},
        {"models": ["m"]},
        {"model": "m", "fallbacks": [{"model": "dear"}]},
        {"model": "m", "fallbacks": [{"name": "dear"}]},
        {"model": "m", "fallbacks": {"model": "dear"}},
    ],
)
def test_only_the_models_of_the_job_are_asked_for(body: object) -> None:
    async def test() -> None:
        async with running() as it:
            got = await it.ask(body=body)
            assert (got.status, got.error) == (403, "pidispatch_model")
            assert not it.provider.seen

    go(test())


def test_other_models_may_stand_in_when_they_are_allowed_too() -> None:
    async def test() -> None:
        async with running(models=["p/m", "p/n"]) as it:
            body = {"model": "n", "models": ["m"], "fallbacks": [{"model": "m"}]}
            assert (await it.ask(body=body)).status == 200
            assert (await it.booked())["model"] == "n"

    go(test())


def test_a_google_body_cannot_name_another_model_than_its_path() -> None:
    async def test() -> None:
        async with running(style="google-generative-ai") as it:
            path = "/v1beta/models/m:generateContent"
            assert (await it.ask(path, {"model": "models/dear"})).status == 403
            assert (await it.ask(path, {"contents": []})).status == 200

    go(test())


def test_two_providers_on_one_host_are_told_apart_by_path_and_model() -> None:
    async def test() -> None:
        async with running() as outer:
            base = f"http://127.0.0.1:{outer.provider.port}"
            common = {"authHeader": "authorization", "authPrefix": "Bearer "}
            providers = {
                "a": {
                    "baseUrl": f"{base}/api",
                    "style": "anthropic-messages",
                    "key": "key-a",
                    **common,
                },
                "b": {
                    "baseUrl": f"{base}/api/v1",
                    "style": "openai-completions",
                    "key": "key-b",
                    **common,
                },
            }
            line = terms_line(1, "openai-completions", providers=providers)
            terms = json.loads(line) | {"models": ["a/m", "b/m"]}
            lines: list[dict[str, Any]] = []
            other = gate.Gate(
                gate.read_terms(json.dumps(terms)), lines.append, tls=TRUST
            )
            outer.port, outer.lines = await other.start("127.0.0.1", 0), lines
            await outer.ask("/api/v1/messages")
            await outer.ask("/api/v1/chat/completions")
            await outer.booked(2)
            keys = [seen.values("authorization")[0] for seen in outer.provider.seen]
            assert keys == ["Bearer key-a", "Bearer key-b"]
            assert [line["provider"] for line in lines] == ["a", "b"]
            await other.stop()

    go(test())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"null",
        b'"m"',
        b"{",
        b'{"model":"m"} {}',
        b'{"model":"m","model":"dear"}',
        b'{"model":"m","mod\\u0065l":"dear"}',
        b'{"model":"m","Model":"dear"}',
        b'{"model":"m","MODELS":["dear"]}',
        b'{"model":"m","fallback\xc5\xbf":[{"model":"dear"}]}',
        b'{"model":"m","Stream":true}',
        b'{"model":"m","x":{"a":1,"a":2}}',
        b'{"model":"m",/*"*/"x":1}',
        b'{"model":"m","x":"\xff"}',
        b'{"model":"m","x":"' + b"y" * 300 + b'\xc0\xa2"}',
        b'\xef\xbb\xbf{"model":"m"}',
        '{"model":"m"}'.encode("utf-16"),
        '{"model":"m"}'.encode("utf-16-le"),
        '{"model":"m"}'.encode("utf-32-be"),
        b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model":"m","x":"unclosed}',
    ],
)
def test_a_body_that_two_parsers_could_read_differently_is_refused(raw: bytes) -> None:
    async def test() -> None:
        async with running() as it:
            got = await it.ask(raw=raw)
            assert (got.status, got.error) == (400, "pidispatch_form")
            assert not it.provider.seen

    go(test())


def test_a_response_that_would_run_on_in_the_background_is_refused() -> None:
    async def test() -> None:
        async with running(style="openai-responses") as it:
            body = {"model": "m", "background": True}
            assert (await it.ask("/v1/responses", body)).status == 403
            assert not it.provider.seen

    go(test())


NAMES = st.text().filter(lambda name: name.casefold() not in gate.TELLING)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4)
    ),
    max_leaves=12,
)
BODIES = st.dictionaries(NAMES, JSON, max_size=5)


@settings(max_examples=60, deadline=None)
@given(BODIES, st.booleans(), st.text(min_size=250, max_size=270))
def test_the_outline_of_a_body_has_its_members_whatever_the_strings_hold(
    fields: dict[str, Any], ascii_only: bool, long: str
) -> None:
    fields |= {"model": 'a"b\\', "long": [long, {long: long + "z"}]}
    text = bytearray(json.dumps(fields, ensure_ascii=ascii_only).encode())
    outline = gate.outline(text)
    assert list(outline) == list(fields)
    assert outline["model"] == 'a"b\\'
    assert list(outline["long"][1]) == [long]
    short = {k: v for k, v in fields.items() if len(json.dumps({k: v})) < 200}
    assert {name: outline[name] for name in short} == short


@pytest.mark.parametrize("end", [b"", b"\\", b'"', b'"}'])
def test_a_body_made_to_take_for_ever_is_judged_at_once(end: bytes) -> None:
    body = bytearray(b'{"model":"m","x":"' + b'\\"' * (4 * gate.MIB) + end)
    with contextlib.suppress(gate.Refused):
        assert gate.outline(body)["x"] == ""
        assert end == b'"}'


def test_a_head_made_to_take_for_ever_is_judged_at_once() -> None:
    line = b"x:" + b" \t" * 30_000 + b"\x00"
    with pytest.raises(gate.Refused):
        gate.parse_head(b"GET / HTTP/1.1\r\n" + line + b"\r\n\r\n", gate.REQUEST)


@pytest.mark.parametrize("unit", [b"[],", b'"",', b'"' + b"x" * 300 + b'":1,', b"1,"])
def test_a_body_made_to_fill_the_memory_is_refused_early(unit: bytes) -> None:
    body = bytearray(b'{"model":"m","x":[' + unit * (8 * gate.MIB // len(unit)))
    with pytest.raises(gate.Refused):
        gate.outline(body)


# ---------------------------------------------------------------- what is passed on


def test_a_request_goes_on_as_it_came_but_for_key_encoding_and_hop_by_hop() -> None:
    async def test() -> None:
        async with running(style="anthropic-messages") as it:
            raw = b'{ "model" : "m",\n "x":1.0, "y":"\\u00e9\xc3\xa9" }'
            headers = {
                "x-api-key": TOKEN,
                "anthropic-version": "2023-06-01",
                "Anthropic-Beta": "a,b",
                "content-type": "application/json",
                "accept-encoding": "gzip, br",
                "connection": "keep-alive, x-hop",
                "x-hop": "1",
                "te": "trailers",
                "expect": "100-continue",
                "x-pidispatch-fork": "c1/f1",
            }
            request = it.head(
                "POST",
                "/v1/messages?beta=true",
                {**headers, "content-length": str(len(raw))},
            )
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(request)
            assert await reader.readuntil(b"\r\n\r\n") == (
                b"HTTP/1.1 100 Continue\r\n\r\n"
            )
            writer.write(raw)
            await reader.read()
            writer.close()
            seen = it.provider.seen[0]
            assert seen.line == "POST /v1/messages?beta=true HTTP/1.1"
            assert seen.body == raw
            assert sorted(seen.headers) == sorted(
                [
                    ("host", f"127.0.0.1:{it.provider.port}"),
                    ("anthropic-version", "2023-06-01"),
                    ("anthropic-beta", "a,b"),
                    ("content-type", "application/json"),
                    ("accept-encoding", "identity"),
                    ("connection", "close"),
                    ("x-api-key", KEY),
                    ("content-length", str(len(raw))),
                ]
            )

    go(test())


def test_a_chunked_request_goes_on_with_a_length() -> None:
    async def test() -> None:
        async with running() as it:
            raw = json.dumps({"model": "m", "x": "y" * 100_000}).encode()
            headers = {
                "authorization": f"Bearer {TOKEN}",
                "transfer-encoding": "Chunked",
            }
            request = it.head("POST", "/v1/chat/completions", headers)
            request += chunk(raw[:3]) + b"00A;ext=1\r\n" + raw[3:13] + b"\r\n"
            request += chunk(raw[13:]) + b"0\r\nx-trailer: 1\r\n\r\n"
            assert (await it.raw(request)).status == 200
            seen = it.provider.seen[0]
            assert seen.body == raw
            assert seen.values("content-length") == [str(len(raw))]
            assert seen.values("transfer-encoding") == []

    go(test())


def test_an_answer_comes_back_with_its_status_headers_and_bytes() -> None:
    async def give(writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 429 Slow Down\r\nretry-after: 7\r\nx-a: 1\r\nx-a: 2\r\n"
            b"keep-alive: timeout=5\r\nconnection: keep-alive, x-hop\r\nx-hop: 1\r\n"
            b"content-length: 3\r\n\r\n\x00\xff\n"
        )

    async def test() -> None:
        async with running(give) as it:
            got = await it.ask()
            assert (got.status, got.body) == (429, b"\x00\xff\n")
            assert got.headers == {
                "content-length": "3",
                "retry-after": "7",
                "x-a": "2",
                "connection": "close",
            }

    go(test())


@pytest.mark.parametrize("status", [301, 302, 307, 308, 401, 429, 500, 529])
def test_redirects_are_not_followed_and_failures_not_retried(status: int) -> None:
    async def give(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d x\r\nlocation: /v1/models\r\n" % status)
        writer.write(b"content-length: 0\r\n\r\n")

    async def test() -> None:
        async with running(give) as it:
            assert (await it.ask()).status == status
            assert len(it.provider.seen) == 1
            line = await it.booked()
            assert (line["status"], line["total"], line["estimated"]) == (
                status,
                0,
                False,
            )

    go(test())


def test_an_answer_reaches_the_box_while_the_provider_is_still_writing() -> None:
    arrived = asyncio.Event()

    async def give(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for number in range(5):
            writer.write(chunk(event({"n": number})))
            await arrived.wait()  # hangs for good if the gate held the piece back
            arrived.clear()
        writer.write(b"0\r\n\r\n")

    async def test() -> None:
        async with running(give) as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            body = b'{"model":"m"}'
            headers = {"authorization": f"Bearer {TOKEN}", "content-length": "13"}
            writer.write(it.head("POST", "/v1/chat/completions", headers) + body)
            for number in range(5):
                await reader.readuntil(event({"n": number}) + b"\r\n")
                arrived.set()
            assert await reader.read() == b"0\r\n\r\n"
            writer.close()

    go(test())


def test_a_box_that_reads_slowly_slows_the_provider_and_not_the_memory() -> None:
    stalled, size = asyncio.Event(), 64 * 1024 * 1024

    async def give(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size // 65536):
            writer.write(b" " * 65536)
            drained = asyncio.ensure_future(writer.drain())
            if not (await asyncio.wait({drained}, timeout=0.05))[0]:
                stalled.set()
            await drained

    async def test() -> None:
        async with running(give) as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            body = b'{"model":"m"}'
            headers = {"authorization": f"Bearer {TOKEN}", "content-length": "13"}
            writer.write(it.head("POST", "/v1/chat/completions", headers) + body)
            await stalled.wait()
            await reader.readuntil(b"\r\n\r\n")
            got = 0
            while piece := await reader.read(1 << 20):
                got += len(piece)
            assert got == size
            writer.close()

    go(test())


# ------------------------------------------------------------------- asking for usage


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (
            '{"model":"m","stream":true}',
            '{"stream_options":{"include_usage":true},"model":"m","stream":true}',
        ),
        (
            ' {\n"model":"m","stream":true}',
            ' {"stream_options":{"include_usage":true},\n"model":"m","stream":true}',
        ),
        (
            '{"model":"m","stream":true,"stream_options": null}',
            '{"model":"m","stream":true,"stream_options": {"include_usage": true}}',
        ),
        (
            '{"model":"m","stream":true,"stream_options":{"include_usage":false}}',
            '{"model":"m","stream":true,"stream_options":{"include_usage": true}}',
        ),
        (
            '{"stream_options":{"a":1},"model":"m","stream":1}',
            '{"stream_options":{"a": 1, "include_usage": true},"model":"m","stream":1}',
        ),
        ('{"model":"m","stream":true,"stream_options":{"include_usage":true}}', None),
        ('{"model":"m","stream":false}', None),
        ('{"model":"m"}', None),
    ],
)
def test_a_chat_stream_is_made_to_tell_its_usage(
    sent: str, expected: str | None
) -> None:
    async def test() -> None:
        async with running() as it:
            assert (await it.ask(raw=sent.encode())).status == 200
            assert it.provider.seen[0].body.decode() == (expected or sent)

    go(test())


@pytest.mark.parametrize(
    "members",
    [
        '"stream_options":7',
        '"stream_options":[{}]',
        '"stream_options":{"a":{}}',
        '"stream_options":{"a":{}},"x":{"stream_options":null}',
        '"stream_options":{},"x":{"stream_options":{}}',
        '"stream\\u005foptions":null',
    ],
)
def test_stream_options_that_cannot_be_set_for_certain_are_refused(
    members: str,
) -> None:
    async def test() -> None:
        async with running() as it:
            raw = f'{{"model":"m","stream":true,{members}}}'
            assert (await it.ask(raw=raw.encode())).status == 400

    go(test())


@pytest.mark.parametrize("style", [it for it in STYLE_PATHS if "completions" not in it])
def test_no_other_style_is_asked_for_usage(style: str) -> None:
    async def test() -> None:
        async with running(style=style) as it:
            raw = b'{"model":"m","stream":true}'
            path = STYLE_PATHS[style][1]
            assert (await it.ask(path, raw=raw)).status == 200
            assert it.provider.seen[0].body == raw

    go(test())


OPTIONS = [None, {}, {"include_usage": False}, {"x": '}{"\\'}]


@settings(max_examples=60, deadline=None)
@given(BODIES, st.sampled_from(OPTIONS))
def test_asking_for_usage_changes_nothing_else(
    fields: dict[str, Any], options: dict[str, Any] | None
) -> None:
    fields |= {"model": "m", "stream": True}
    if options != {}:
        fields |= {"stream_options": options}
    body = bytearray(json.dumps(fields).encode())
    gate.ask_for_usage(body, gate.outline(body))
    wanted = {**(options or {}), "include_usage": True}
    assert json.loads(body) == {**fields, "stream_options": wanted}


# -------------------------------------------------------------------------- metering

CHAT = {"id": "c", "object": "chat.completion.chunk", "choices": []}
ANTHROPIC_USAGE = {
    "input_tokens": 100,
    "cache_read_input_tokens": 2000,
    "cache_creation_input_tokens": 300,
    "output_tokens": 1,
}
OPENAI_USAGE = {
    "prompt_tokens": 2400,
    "completion_tokens": 50,
    "total_tokens": 2450,
    "prompt_tokens_details": {"cached_tokens": 2000, "cache_write_tokens": 300},
    "completion_tokens_details": {"reasoning_tokens": 20},
}
RESPONSES_USAGE = {
    "input_tokens": 2400,
    "input_tokens_details": {"cached_tokens": 2000, "cache_write_tokens": 300},
    "output_tokens": 50,
    "output_tokens_details": {"reasoning_tokens": 20},
    "total_tokens": 2450,
}
GOOGLE_USAGE = {
    "promptTokenCount": 2390,
    "cachedContentTokenCount": 2000,
    "toolUsePromptTokenCount": 10,
    "candidatesTokenCount": 30,
    "thoughtsTokenCount": 20,
    "totalTokenCount": 2450,
}
MISTRAL_USAGE = {
    "prompt_tokens": 2400,
    "completion_tokens": 50,
    "total_tokens": 2450,
    "num_cached_tokens": 2000,
}
STREAMS = {
    "anthropic-messages": (
        event(
            {
                "type": "message_start",
                "message": {"id": "m", "content": [], "usage": ANTHROPIC_USAGE},
            },
            "message_start",
        )
        + event({"type": "ping"}, "ping")
        + event(
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": '"usage": {} \n\n data: é'},
            },
            "content_block_delta",
        )
        + event(
            {
                "type": "message_delta",
                "delta": {"stop_reason": "end_turn"},
                "usage": {"output_tokens": 50},
            },
            "message_delta",
        )
        + event({"type": "message_stop"}, "message_stop"),
        (100, 50, 2000, 300),
    ),
    "openai-completions": (
        b": OPENROUTER PROCESSING\n\n"
        + event({**CHAT, "choices": [{"delta": {"content": "hi"}}], "usage": None})
        + event({**CHAT, "usage": OPENAI_USAGE})
        + b"data: [DONE]\n\n",
        (100, 50, 2000, 300),
    ),
    "openai-responses": (
        event(
            {"type": "response.created", "response": {"usage": None}},
            "response.created",
        )
        + event({"type": "response.output_text.delta", "delta": "hi"})
        + event(
            {"type": "response.completed", "response": {"usage": RESPONSES_USAGE}},
            "response.completed",
        ),
        (100, 50, 2000, 300),
    ),
    "google-generative-ai": (
        event(
            {
                "candidates": [{"content": {"parts": [{"text": "h"}]}}],
                "usageMetadata": {"promptTokenCount": 2390, "totalTokenCount": 2390},
            }
        )
        + event({"candidates": [], "usageMetadata": GOOGLE_USAGE}),
        (400, 50, 2000, 0),
    ),
    "mistral-conversations": (
        event({**CHAT, "choices": [{"delta": {"content": "hi"}}]})
        + event({**CHAT, "choices": [{"delta": {}}], "usage": MISTRAL_USAGE})
        + b"data: [DONE]\n\n",
        (400, 50, 2000, 0),
    ),
}
PLAIN = {
    "anthropic-messages": {
        "type": "message",
        "usage": {**ANTHROPIC_USAGE, "output_tokens": 50},
    },
    "openai-completions": {**CHAT, "usage": OPENAI_USAGE},
    "openai-responses": {"id": "r", "output": [], "usage": RESPONSES_USAGE},
    "google-generative-ai": {"candidates": [], "usageMetadata": GOOGLE_USAGE},
    "mistral-conversations": {**CHAT, "usage": MISTRAL_USAGE},
}


def metered(style: str, *pieces: bytes) -> tuple[tuple[int, ...], bool]:
    meter = gate.Meter(gate.STYLES[style])
    for piece in pieces:
        meter.feed(piece)
    meter.end()
    usage, estimated = meter.settled(0)
    return tuple(figure or 0 for figure in usage), estimated


def cut(text: bytes, places: list[int]) -> list[bytes]:
    marks = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(marks)]


CUTS = st.lists(st.integers(min_value=0, max_value=10_000), max_size=40)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(STREAMS)), st.sampled_from(["\n", "\r\n", "\r"]), CUTS)
def test_a_streams_usage_is_found_however_the_stream_is_cut(
    style: str, line_end: str, places: list[int]
) -> None:
    text, usage = STREAMS[style]
    text = text.replace(b"\n", line_end.encode())
    assert metered(style, *cut(text, places)) == (usage, False)


@pytest.mark.parametrize("style", STREAMS)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_a_streams_usage_is_found_byte_by_byte(style: str, line_end: bytes) -> None:
    text, usage = STREAMS[style]
    text = text.replace(b"\n", line_end)
    pieces = [text[at : at + 1] for at in range(len(text))]
    assert metered(style, *pieces) == (usage, False)


def test_an_event_may_span_lines_and_lack_its_last_one() -> None:
    usage = json.dumps({"usage": OPENAI_USAGE}, indent=1).encode()
    text = b"data: " + usage.replace(b"\n", b"\r\ndata: ")
    pieces = [text[at : at + 1] for at in range(len(text))]
    assert metered("openai-completions", *pieces) == ((100, 50, 2000, 300), False)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(PLAIN)), st.sampled_from([None, 1, 4]), CUTS)
def test_a_plain_answers_usage_is_found_however_it_is_cut(
    style: str, indent: int | None, places: list[int]
) -> None:
    text = b" \n" + json.dumps(PLAIN[style], indent=indent).encode()
    assert metered(style, *cut(text, places)) == (STREAMS[style][1], False)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(STREAMS)), st.binary(max_size=200), CUTS)
def test_no_answer_whatever_breaks_the_meter(
    style: str, text: bytes, places: list[int]
) -> None:
    usage = b'data: {"usage": ' + text + b"}\n\n"
    for whole in (text, b"{" + text, usage, usage.removeprefix(b"data: ")):
        figures, _ = metered(style, *cut(whole, places))
        assert all(figure >= 0 for figure in figures)


@pytest.mark.parametrize(
    ("style", "event_", "usage"),
    [
        # DeepSeek
        (
            "openai-completions",
            {"usage": {"prompt_tokens": 9, "prompt_cache_hit_tokens": 4}},
            (5, 0, 4, 0),
        ),
        # Kimi; Moonshot's place
        (
            "openai-completions",
            {"choices": [{"usage": {"prompt_tokens": 9, "cached_tokens": 4}}]},
            (5, 0, 4, 0),
        ),
        # Groq
        (
            "openai-completions",
            {"x_groq": {"usage": {"prompt_tokens": 9, "completion_tokens": 1}}},
            (9, 1, 0, 0),
        ),
        # xAI: reasoning only in the total
        (
            "openai-completions",
            {
                "usage": {
                    "prompt_tokens": 9,
                    "completion_tokens": 1,
                    "total_tokens": 30,
                }
            },
            (9, 21, 0, 0),
        ),
        # more cached than asked: never below nothing
        (
            "openai-completions",
            {"usage": {"prompt_tokens": 3, "cached_tokens": 9}},
            (0, 0, 3, 0),
        ),
        # a streamed Google answer without alt=sse is a list
        (
            "google-generative-ai",
            [{}, {"usageMetadata": GOOGLE_USAGE}],
            (400, 50, 2000, 0),
        ),
    ],
)
def test_the_providers_own_spellings_are_read(
    style: str, event_: object, usage: tuple[int, ...]
) -> None:
    assert metered(style, json.dumps(event_).encode())[0] == usage


@pytest.mark.parametrize("prompt", [-1, 1e300, "9", None, [9], float("nan")])
def test_a_figure_that_makes_no_sense_is_no_figure(prompt: object) -> None:
    usage = {"prompt_tokens": prompt, "completion_tokens": 3}
    text = json.dumps({"usage": usage}).encode()
    assert metered("openai-completions", text)[1] is True


def test_one_huge_event_does_not_hide_the_usage_after_it() -> None:
    text, usage = STREAMS["openai-completions"]
    huge = b'data: {"usage":"' + b"x" * 200_000 + b'"}\n\n'
    meter = gate.Meter(gate.STYLES["openai-completions"])
    for _ in range(2 * gate.MAX_EVENT // len(huge)):
        meter.feed(huge.replace(b"\n\n", b""))
    assert len(meter._line) + len(meter._data) <= gate.MAX_EVENT
    meter.feed(b"\n\n" + text)
    assert tuple(meter.usage) == usage


def test_a_plain_answer_over_the_cap_is_estimated_and_not_kept() -> None:
    meter = gate.Meter(gate.STYLES["openai-completions"])
    for piece in (b'{"x":"', *[b"y" * 65536] * 100, b'","usage":{"prompt_tokens":1}}'):
        meter.feed(piece)
    meter.end()
    assert len(meter._line) <= gate.MAX_EVENT
    assert meter.settled(100)[1]


@pytest.mark.parametrize("style", STREAMS)
def test_a_stream_through_the_gate_is_untouched_and_booked(style: str) -> None:
    text, usage = STREAMS[style]

    async def test() -> None:
        async with running(stream(text[:7], text[7:99], text[99:]), style=style) as it:
            got = await it.ask(STYLE_PATHS[style][1])
            assert (got.status, got.body, got.whole) == (200, text, True)
            line = await it.booked()
            figures = [
                line[name] for name in ("input", "output", "cacheRead", "cacheWrite")
            ]
            assert tuple(figures) == usage
            assert line["total"] == sum(usage)
            assert (line["style"], line["estimated"]) == (style, False)

    go(test())


def test_a_stream_that_ends_with_its_connection_is_booked() -> None:
    text, usage = STREAMS["openai-completions"]

    async def give(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\n\r\n")
        writer.write(text)

    async def test() -> None:
        async with running(give) as it:
            got = await it.ask()
            assert (got.body, got.whole) == (text, True)
            assert (await it.booked())["total"] == sum(usage)

    go(test())


def test_when_the_box_hangs_up_the_answer_is_read_to_its_end_and_booked() -> None:
    text, usage = STREAMS["openai-completions"]
    gone = asyncio.Event()

    async def give(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(b": first\n\n"))
        await gone.wait()
        for _ in range(50):
            writer.write(chunk(b": " + b"more " * 1000 + b"\n\n"))
            await writer.drain()
        writer.write(chunk(text) + b"0\r\n\r\n")

    async def test() -> None:
        async with running(give) as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            headers = {"authorization": f"Bearer {TOKEN}", "content-length": "13"}
            head = it.head("POST", "/v1/chat/completions", headers)
            writer.write(head + b'{"model":"m"}')
            await reader.readuntil(b": first\n\n")
            writer.transport.abort()
            gone.set()
            line = await it.booked()
            assert (line["total"], line["estimated"]) == (sum(usage), False)

    go(test())


def test_an_answer_without_usage_is_estimated_from_the_bytes() -> None:
    async def test() -> None:
        async with running(answer(b"x" * 1001)) as it:
            await it.ask(body={"model": "m", "pad": "y" * 500})
            sent = len(it.provider.seen[0].body)
            line = await it.booked()
            assert line["estimated"] is True
            assert line["total"] == (sent + 1001) // 4
            assert line["sum"]["estimated"] == 1

    go(test())


def test_an_answer_that_breaks_off_looks_broken_and_its_rest_is_estimated() -> None:
    text = STREAMS["anthropic-messages"][0]
    begun = text[: text.index(b"event: message_delta")]

    async def give(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(begun))
        await writer.drain()

    async def test() -> None:
        async with running(give, style="anthropic-messages") as it:
            got = await it.ask("/v1/messages")
            assert (got.status, got.whole) == (200, False)
            line = await it.booked()
            assert line["estimated"] is True
            assert (line["input"], line["cacheRead"]) == (100, 2000)
            assert len(begun) // 4 <= line["output"] <= len(begun) // 4 + 20

    go(test())


def test_a_call_that_was_sent_and_never_answered_is_estimated() -> None:
    async def hang_up(writer: asyncio.StreamWriter) -> None:
        pass

    async def test() -> None:
        async with running(hang_up) as it:
            got = await it.ask(body={"model": "m", "pad": "y" * 400})
            assert (got.status, got.error) == (502, "pidispatch_upstream")
            line = await it.booked()
            assert (line["status"], line["estimated"]) == (502, True)
            assert line["total"] == len(it.provider.seen[0].body) // 4

    go(test())


def test_a_provider_that_cannot_be_reached_costs_nothing() -> None:
    async def test() -> None:
        async with running() as it:
            free = socket.socket()
            free.bind(("127.0.0.1", 0))
            line = terms_line(free.getsockname()[1], "openai-completions")
            it.provider.port = free.getsockname()[1]
            other = gate.Gate(gate.read_terms(line), it.lines.append, tls=TRUST)
            it.port = await other.start("127.0.0.1", 0)
            assert (await it.ask()).status == 502
            booked = await it.booked()
            assert (booked["total"], booked["estimated"]) == (0, False)
            await other.stop()
            free.close()

    go(test())


def test_a_silent_provider_is_given_up_after_a_while() -> None:
    async def silent(writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async def test() -> None:
        limits = gate.Limits(upstream=0.03, linger=0.01)
        async with running(silent, limits=limits) as it:
            assert (await it.ask()).status == 504
            assert (await it.booked())["status"] == 504

    go(test())


def test_a_provider_that_refuses_and_reads_no_further_is_heard() -> None:
    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await answer(b"big", "413 Too Large")(writer)
        await asyncio.Event().wait()

    async def test() -> None:
        async with running() as it:
            server = await asyncio.start_server(early, "127.0.0.1", 0)
            it.provider.port = server.sockets[0].getsockname()[1]
            limits = gate.Limits(upstream=0.05)
            line = terms_line(it.provider.port, "openai-completions")
            other = gate.Gate(gate.read_terms(line), it.lines.append, limits, tls=TRUST)
            it.port = await other.start("127.0.0.1", 0)
            got = await it.ask(body={"model": "m", "pad": "y" * 30_000_000})
            assert (got.status, got.body) == (413, b"big")
            assert (await it.booked())["total"] == 0
            await other.stop()
            server.close()

    go(test())


# ----------------------------------------------------------- budget, forks and prices


def test_a_spent_budget_refuses_the_next_call_with_403_and_its_own_type() -> None:
    async def test() -> None:
        usage = {"prompt_tokens": 60, "completion_tokens": 40}
        give = answer(json.dumps({"usage": usage}).encode())
        async with running(give, budget=1000, spent=850) as it:
            assert [(await it.ask()).status for _ in range(2)] == [200, 200]
            got = await it.ask(body={"model": "m", "pad": "y" * 1_000_000})
            assert (got.status, got.error) == (403, "pidispatch_budget")
            assert it.of("refused") == [
                {"event": "refused", "reason": "budget", "host": None}
            ]
            assert len(it.provider.seen) == 2
            assert (await it.booked(2))["sum"]["total"] == 200

    go(test())


def test_a_budget_that_was_spent_before_allows_no_call() -> None:
    async def test() -> None:
        async with running(budget=1000, spent=1000) as it:
            assert (await it.ask()).error == "pidispatch_budget"
            assert (await it.ask("/v1/models", method="GET")).status == 200

    go(test())


def test_what_a_stream_has_said_counts_before_the_stream_is_over() -> None:
    end = asyncio.Event()

    async def give(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(STREAMS["openai-completions"][0]))
        await end.wait()
        writer.write(b"0\r\n\r\n")

    async def test() -> None:
        async with running(give, budget=100) as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            headers = {"authorization": f"Bearer {TOKEN}", "content-length": "13"}
            head = it.head("POST", "/v1/chat/completions", headers)
            writer.write(head + b'{"model":"m"}')
            await reader.readuntil(b"[DONE]")
            assert not it.of("call")
            assert (await it.ask()).error == "pidispatch_budget"
            end.set()
            await reader.read()
            writer.close()

    go(test())


def test_a_budget_is_overshot_by_the_calls_in_flight_and_no_more() -> None:
    begin = asyncio.Event()
    usage = {"prompt_tokens": 600, "completion_tokens": 400}

    async def give(writer: asyncio.StreamWriter) -> None:
        await begin.wait()
        await answer(json.dumps({"usage": usage}).encode())(writer)

    async def test() -> None:
        limits = gate.Limits(calls=3, linger=0.05)
        async with running(give, budget=1, limits=limits) as it:
            asked = [asyncio.create_task(it.ask()) for _ in range(10)]
            while len(it.provider.seen) < 3:
                await asyncio.sleep(0.001)
            begin.set()
            statuses = sorted(it.status for it in await asyncio.gather(*asked))
            assert statuses == [200] * 3 + [403] * 7
            assert (await it.booked(3))["sum"]["total"] == 3000
            assert len(it.provider.seen) == 3

    go(test())


def test_forks_are_summed_apart_and_their_header_stays_here() -> None:
    async def test() -> None:
        usage = {"prompt_tokens": 6, "completion_tokens": 4}
        give = answer(json.dumps({"usage": usage}).encode())
        price = {"input": 1, "output": 1, "cacheRead": 1, "cacheWrite": 1}
        async with running(give, prices={"p/m": price}) as it:
            forks = ["call_1|fc_2/a", "call_1|fc_2/a", "call_1|fc_2/b", "", "no-slash"]
            for fork in [*forks, 'x"/y', f"{TOKEN}/a"]:
                await it.ask(
                    headers={
                        "authorization": f"Bearer {TOKEN}",
                        "x-pidispatch-fork": fork,
                    }
                )
            line = await it.booked(7)
            assert [call["fork"] for call in it.of("call")] == [*forks[:3], *[None] * 4]
            assert line["sum"]["forks"] == {
                "call_1|fc_2/a": {"calls": 2, "total": 20, "cost": 2e-05},
                "call_1|fc_2/b": {"calls": 1, "total": 10, "cost": 1e-05},
            }
            assert line["sum"]["total"] == 70
            assert "fork" not in str(it.provider.seen)

    go(test())


def test_the_running_sum_tells_only_so_many_forks_apart() -> None:
    ledger = gate.Ledger(
        gate.read_terms(terms_line(1, "openai-completions")), [].append
    )
    provider = ledger._terms.providers[0]
    for number in range(gate.MAX_FORKS + 10):
        call = gate.Call(
            provider, "m", f"c/{number}", 4, gate.Meter(provider.style), sent=True
        )
        with ledger.booking(call):
            pass
    forks: Any = ledger._totals()["forks"]
    assert len(forks) == gate.MAX_FORKS + 1
    assert forks["other"]["calls"] == 10


def test_calls_are_priced_by_kind_of_token_and_summed() -> None:
    async def test() -> None:
        text, _ = STREAMS["anthropic-messages"]
        prices = {
            "p/m": {"input": 3, "output": 15, "cacheRead": 0.3, "cacheWrite": 3.75}
        }
        cost = (100 * 3 + 50 * 15 + 2000 * 0.3 + 300 * 3.75) / 1e6
        async with running(
            stream(text),
            style="anthropic-messages",
            prices=prices,
            models=["p/m", "p/n"],
        ) as it:
            await it.ask("/v1/messages")
            await it.ask("/v1/messages")
            line = await it.booked(2)
            assert line["cost"] == pytest.approx(cost)
            assert line["sum"]["cost"] == pytest.approx(2 * cost)
            assert line["sum"] == {
                "calls": 2,
                "input": 200,
                "output": 100,
                "cacheRead": 4000,
                "cacheWrite": 600,
                "total": 4900,
                "cost": line["sum"]["cost"],
                "estimated": 0,
                "forks": {},
            }
            await it.ask("/v1/messages", {"model": "n"})
            line = await it.booked(3)
            assert (line["cost"], line["sum"]["cost"]) == (None, None)

    go(test())


# -------------------------------------------------------------------- CONNECT: names


@contextlib.asynccontextmanager
async def echo(host: str = "127.0.0.1") -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65536):
            writer.write(piece)
        writer.close()

    server = await asyncio.start_server(serve, host, 0)
    yield int(server.sockets[0].getsockname()[1])
    server.close()


def asked_for(target: str) -> bytes:
    return f"CONNECT {target} HTTP/1.1\r\nhost: {target}\r\n\r\n".encode()


@pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/1.0"])
def test_connect_to_a_listed_host_is_a_plain_tunnel(version: str) -> None:
    async def test() -> None:
        async with echo() as port, running(allow=[f"127.0.0.1:{port}"]) as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            head = f"CONNECT 127.0.0.1:{port} {version}\r\n\r\n".encode()
            writer.write(head + b"early")
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            data = bytes(range(256)) * 4000
            writer.write(data)
            writer.write_eof()
            assert await reader.read() == b"early" + data
            writer.close()
            assert it.lines == [{"event": "connect", "host": "127.0.0.1", "port": port}]

    go(test())


ALLOWED = ["registry.example", "Api.Example.:8443", "bücher.example", "[2001:DB8::1]"]


@pytest.mark.parametrize(
    ("target", "host", "port"),
    [
        ("registry.example:443", "registry.example", 443),
        ("REGISTRY.Example:443", "registry.example", 443),
        ("registry.example.:443", "registry.example", 443),
        ("api.example:8443", "api.example", 8443),
        ("xn--bcher-kva.example:443", "xn--bcher-kva.example", 443),
        ("[2001:db8:0::1]:443", "2001:db8::1", 443),
    ],
)
def test_a_listed_name_is_known_in_every_spelling_and_resolved_once(
    target: str, host: str, port: int
) -> None:
    asked: list[tuple[str, int]] = []

    async def resolve(name: str, number: int) -> list[str]:
        asked.append((name, number))
        raise OSError

    async def test() -> None:
        async with running(allow=ALLOWED, resolve=resolve) as it:
            assert (await it.raw(asked_for(target))).status == 502
            assert asked == [(host, port)]

    go(test())


@pytest.mark.parametrize(
    ("target", "host"),
    [
        ("evil.example:443", "evil.example"),
        ("registry.example:80", "registry.example"),
        ("registry.example:8443", "registry.example"),
        ("api.example:443", "api.example"),
        ("sub.registry.example:443", "sub.registry.example"),
        ("registry.example.evil:443", "registry.example.evil"),
        ("127.0.0.1:443", "127.0.0.1"),
        ("169.254.169.254:443", "169.254.169.254"),
        ("[::1]:443", "::1"),
        ("[::ffff:127.0.0.1]:443", "::ffff:7f00:1"),
        ("gate:443", "gate"),
        (f"{TOKEN}:443", None),
        (f"x.{TOKEN.upper()}.example:443", None),
    ],
)
def test_a_name_off_the_list_is_refused_before_it_is_resolved(
    target: str, host: str | None
) -> None:
    """T53: whatever a prompt talks the agent into."""

    async def resolve(name: str, number: int) -> list[str]:
        raise AssertionError(name)

    async def test() -> None:
        async with running(allow=ALLOWED, resolve=resolve) as it:
            got = await it.raw(asked_for(target))
            assert (got.status, got.error) == (403, "pidispatch_host")
            assert it.lines == [{"event": "refused", "reason": "host", "host": host}]

    go(test())


@pytest.mark.parametrize(
    "target",
    [
        "registry.example",
        "registry.example:",
        "registry.example:0",
        "registry.example:0443",
        "registry.example:65536",
        "registry.example:443:443",
        "registry.example:https",
        "user@registry.example:443",
        "user:pw@registry.example:443",
        "https://registry.example:443",
        "registry.example:443/",
        "registry.example..:443",
        ".registry.example:443",
        "registry..example:443",
        "-registry.example:443",
        "registry.example%2e:443",
        "registry.example%00.evil:443",
        "2130706433:443",
        "0x7f000001:443",
        "0x7f.0.0.1:443",
        "127.1:443",
        "0177.0.0.1:443",
        "127.0.0.01:443",
        "1.2.3.256:443",
        "registry.example.1:443",
        "::1:443",
        "[::1:443",
        "[fe80::1%25eth0]:443",
        "[registry.example]:443",
        "/registry.example:443",
        "*:443",
        ":443",
    ],
)
def test_an_odd_connect_target_is_a_bad_request(target: str) -> None:
    async def resolve(name: str, number: int) -> list[str]:
        raise AssertionError(name)

    async def test() -> None:
        async with running(allow=ALLOWED, resolve=resolve) as it:
            assert (await it.raw(asked_for(target))).status == 400
            assert it.lines == [{"event": "refused", "reason": "form", "host": None}]

    go(test())


@pytest.mark.parametrize(
    "request_",
    [
        b"GET http://registry.example/ HTTP/1.1\r\nhost: registry.example\r\n\r\n",
        b"POST https://registry.example/ HTTP/1.1\r\ncontent-length: 0\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\n\r\n",
    ],
)
def test_a_plain_proxy_request_is_a_bad_request(request_: bytes) -> None:
    async def test() -> None:
        async with running(allow=["registry.example:80"]) as it:
            assert (await it.raw(request_)).status == 400

    go(test())


# ---------------------------------------------------------------- CONNECT: addresses


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("10.1.2.3", True),
        ("172.17.0.1", True),
        ("192.168.1.1", True),
        ("fd12::1", True),
        ("127.0.0.1", False),
        ("127.8.8.8", False),
        ("::1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("169.254.169.254", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("224.0.0.1", False),
        ("ff02::1", False),
        ("255.255.255.255", False),
        ("240.0.0.1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:169.254.169.254", False),
        ("::127.0.0.1", False),
        ("2002:7f00:1::", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::5db8:d822", True),
        ("100.100.100.200", False),
        ("168.63.129.16", False),
        ("fd00:ec2::254", False),
    ],
)
def test_a_listed_name_may_be_a_public_or_an_intranet_host_and_nothing_else(
    address: str, allowed: bool
) -> None:
    assert gate.may_connect("registry.example", address) is allowed


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "::1", "10.0.0.1"])
def test_an_address_that_the_operator_listed_is_reached(address: str) -> None:
    assert gate.may_connect(str(ipaddress.ip_address(address)), address)


@pytest.mark.parametrize("host", ["localhost", "github.localhost"])
def test_a_localhost_name_means_the_loopback_and_only_that(host: str) -> None:
    assert gate.may_connect(host, "127.0.0.1")
    assert gate.may_connect(host, "::1")
    assert not gate.may_connect(host, "10.0.0.1")
    assert not gate.may_connect(host, "93.184.216.34")


def test_one_unfit_address_spoils_a_name() -> None:
    async def resolve(name: str, number: int) -> list[str]:
        return ["93.184.216.34", "127.0.0.1"]

    async def test() -> None:
        async with running(allow=["registry.example"], resolve=resolve) as it:
            got = await it.raw(asked_for("registry.example:443"))
            assert (got.status, got.error) == (403, "pidispatch_address")
            assert it.lines == [
                {"event": "refused", "reason": "address", "host": "registry.example"}
            ]

    go(test())


def test_the_address_that_was_judged_is_the_one_that_is_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dialled: list[str] = []
    answers = iter([["93.184.216.34", "10.0.0.9"], ["127.0.0.1"]])

    async def resolve(name: str, number: int) -> list[str]:
        return next(answers)

    async def test() -> None:
        async with running(allow=["rebound.example"], resolve=resolve) as it:
            real = asyncio.open_connection

            async def record(host: str, port: int, **rest: Any) -> Any:
                if port != 443:
                    return await real(host, port, **rest)
                dialled.append(host)
                raise OSError

            monkeypatch.setattr(asyncio, "open_connection", record)
            assert (await it.raw(asked_for("rebound.example:443"))).status == 502
            assert dialled == ["93.184.216.34", "10.0.0.9"]
            got = await it.raw(asked_for("rebound.example:443"))
            assert got.error == "pidispatch_address"
            assert len(dialled) == 2

    go(test())


def test_a_tunnel_that_breaks_off_at_the_far_end_ends_in_the_box_without_a_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def test() -> None:
        async def serve(r: asyncio.StreamReader, w: asyncio.StreamWriter) -> None:
            await r.read(1)
            reset = struct.pack("ii", 1, 0)
            w.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, reset
            )
            w.transport.abort()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with running(allow=[f"127.0.0.1:{port}"]) as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(asked_for(f"127.0.0.1:{port}"))
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"xy")
            with contextlib.suppress(OSError):
                assert await reader.read() == b""
            writer.close()
        server.close()

    go(test())
    assert capsys.readouterr().err == ""


def test_a_tunnel_that_is_silent_both_ways_is_closed() -> None:
    async def test() -> None:
        limits = gate.Limits(tunnel=0.03)
        async with (
            echo() as port,
            running(allow=[f"127.0.0.1:{port}"], limits=limits) as it,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(asked_for(f"127.0.0.1:{port}"))
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            with contextlib.suppress(OSError):
                assert await reader.read() == b""
            writer.close()

    go(test())


def test_a_connect_request_has_no_body() -> None:
    async def test() -> None:
        async with running(allow=["127.0.0.1:9"]) as it:
            raw = b"CONNECT 127.0.0.1:9 HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc"
            assert (await it.raw(raw)).status == 400

    go(test())


# ------------------------------------------------------------------ framing and bounds

AUTH = f"authorization: Bearer {TOKEN}\r\n"


@pytest.mark.parametrize(
    "fields",
    [
        "content-length: 13\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: chunked\r\ncontent-length: 13\r\n",
        "content-length: 13\r\ncontent-length: 13\r\n",
        "content-length: 13\r\ncontent-length: 0\r\n",
        "content-length: 13, 13\r\n",
        "content-length: +13\r\n",
        "content-length: -1\r\n",
        "content-length: 0x0d\r\n",
        "content-length: 1_3\r\n",
        "content-length: \u0661\u0663\r\n",
        "content-length:\r\n",
        "content-length : 13\r\n",
        " content-length: 13\r\n",
        "content-length: 13\r\n folded: 1\r\n",
        "content-length\r\n",
        "transfer-encoding: gzip, chunked\r\n",
        "transfer-encoding: chunked, chunked\r\n",
        "transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: identity\r\n",
        "transfer-encoding: \x0bchunked\r\n",
        "transfer-encoding: xchunked\r\n",
        "x: 1\ncontent-length: 13\r\n",
        "x: 1\rcontent-length: 13\r\n",
        "x: a\x00b\r\ncontent-length: 13\r\n",
        "x\x00y: 1\r\ncontent-length: 13\r\n",
        ": 1\r\ncontent-length: 13\r\n",
        "",
    ],
)
def test_a_request_that_two_servers_could_frame_differently_is_refused(
    fields: str,
) -> None:
    async def test() -> None:
        async with running() as it:
            head = it.head("POST", "/v1/chat/completions", {})[:-2]
            raw = head + (AUTH + fields + "\r\n").encode() + b'{"model":"m"}'
            got = await it.raw(raw)
            assert (got.status, got.error) == (400, "pidispatch_form")
            assert not it.provider.seen

    go(test())


@pytest.mark.parametrize(
    "body",
    [
        b'd\n{"model":"m"}\r\n0\r\n\r\n',
        b'd\r\n{"model":"m"}XX0\r\n\r\n',
        b'0xd\r\n{"model":"m"}\r\n0\r\n\r\n',
        b'-1\r\n{"model":"m"}\r\n0\r\n\r\n',
        b'd \n;\r\n{"model":"m"}\r\n0\r\n\r\n',
        b"fffffffff\r\n",
        b"\r\n",
    ],
)
def test_a_badly_chunked_request_is_refused(body: bytes) -> None:
    async def test() -> None:
        async with running() as it:
            head = it.head("POST", "/v1/chat/completions", {})[:-2]
            raw = head + AUTH.encode() + b"transfer-encoding: chunked\r\n\r\n" + body
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(raw)
            writer.write_eof()
            answered = await reader.read()
            writer.close()
            assert answered == b"" or parse_answer(answered).status == 400
            assert not it.provider.seen

    go(test())


@pytest.mark.parametrize(
    "line",
    [
        b"POST  /x HTTP/1.1",
        b"POST /x HTTP/1.1 ",
        b"POST /x",
        b"post /x HTTP/1.1",
        b"POST /x HTTP/2.0",
        b"POST /x HTTP/0.9",
        b"POST /\xc3\xa9 HTTP/1.1",
        b"POST /x#y HTTP/1.1",
        b"POST x HTTP/1.1",
        b"POST /x HTTP/1.0",
        b"\x16\x03\x01\x02\x00\x01",
    ],
)
def test_an_odd_request_line_is_a_bad_request(line: bytes) -> None:
    async def test() -> None:
        async with running() as it:
            assert (await it.raw(line + b"\r\n\r\n")).status == 400

    go(test())


def test_what_follows_a_request_on_its_connection_is_not_read_as_another() -> None:
    async def test() -> None:
        async with running() as it:
            headers = {"authorization": f"Bearer {TOKEN}", "content-length": "13"}
            once = it.head("POST", "/v1/chat/completions", headers) + b'{"model":"m"}'
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(once + once)
            with contextlib.suppress(OSError):
                await reader.read()
            writer.close()
            await it.booked()
            assert len(it.provider.seen) == 1

    go(test())


def test_a_get_with_a_body_is_refused() -> None:
    async def test() -> None:
        async with running() as it:
            headers = {"authorization": f"Bearer {TOKEN}", "content-length": "4"}
            raw = it.head("GET", "/v1/models", headers) + b"GET "
            assert (await it.raw(raw)).status == 400

    go(test())


def test_a_head_that_is_too_large_is_refused() -> None:
    async def test() -> None:
        async with running() as it:
            raw = b"GET /healthz HTTP/1.1\r\nx: " + b"y" * 200_000 + b"\r\n\r\n"
            assert (await it.raw(raw)).status == 400

    go(test())


def test_a_head_that_does_not_come_is_not_waited_for() -> None:
    async def test() -> None:
        async with running(limits=gate.Limits(head=0.03, linger=0.01)) as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(b"GET /healthz HTTP/1.1\r\nx: ")
            assert parse_answer(await reader.read()).status == 408
            writer.close()

    go(test())


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def test() -> None:
        async with running(limits=gate.Limits(box=0.03)) as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            headers = {"authorization": f"Bearer {TOKEN}", "content-length": "13"}
            writer.write(it.head("POST", "/v1/chat/completions", headers) + b"{")
            with contextlib.suppress(OSError):
                assert await reader.read() == b""
            writer.close()
            assert not it.provider.seen

    go(test())


@pytest.mark.parametrize(
    "framing", ["content-length: 2001", "transfer-encoding: chunked"]
)
def test_a_body_that_is_too_large_is_refused(framing: str) -> None:
    async def test() -> None:
        async with running(limits=gate.Limits(body=2000, linger=0.05)) as it:
            head = it.head("POST", "/v1/chat/completions", {})[:-2]
            raw = head + f"{AUTH}{framing}\r\n\r\n".encode() + chunk(b" " * 2001)
            assert (await it.raw(raw)).status == 413
            assert not it.gate._bodies

    go(test())


def test_a_body_that_will_be_too_large_is_not_waited_for() -> None:
    async def test() -> None:
        async with running(limits=gate.Limits(body=2000, linger=0.05)) as it:
            headers = {"authorization": f"Bearer {TOKEN}", "content-length": "2001"}
            head = it.head("POST", "/v1/chat/completions", headers)
            assert (await it.raw(head)).status == 413

    go(test())


def test_all_bodies_together_are_bounded() -> None:
    async def test() -> None:
        async with running(limits=gate.Limits(body=2000, linger=0.05)) as it:
            headers = {"authorization": f"Bearer {TOKEN}", "content-length": "1500"}
            head = it.head("POST", "/v1/chat/completions", headers)
            _, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(head + b" " * 1400)
            while sum(map(len, it.gate._bodies.values())) < 1400:
                await asyncio.sleep(0.001)
            assert (await it.raw(head + b" " * 1500)).status == 503
            writer.close()

    go(test())


def test_a_connection_too_many_is_dropped() -> None:
    async def test() -> None:
        async with running(limits=gate.Limits(connections=3)) as it:
            held = [await asyncio.open_connection("127.0.0.1", it.port) for _ in "123"]
            while len(it.gate._tasks) < 3:
                await asyncio.sleep(0.001)
            with pytest.raises((OSError, IndexError)):
                await it.raw(b"GET /healthz HTTP/1.1\r\n\r\n")
            for _, writer in held:
                writer.close()
            while it.gate._tasks:
                await asyncio.sleep(0.001)
            assert (await it.raw(b"GET /healthz HTTP/1.1\r\n\r\n")).body == b"ok"

    go(test())


def test_a_refusal_is_readable_while_the_box_is_still_sending() -> None:
    async def test() -> None:
        async with running(limits=gate.Limits(linger=2)) as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            size = 8 * 1024 * 1024
            headers = {"authorization": "Bearer no", "content-length": str(size)}
            writer.write(it.head("POST", "/v1/chat/completions", headers))
            writer.write(b"x" * size)
            assert parse_answer(await reader.read()).error == "pidispatch_token"
            writer.close()

    go(test())


def test_lines_beside_the_meter_stop_before_they_fill_a_log() -> None:
    """T45."""
    lines: list[dict[str, Any]] = []
    ledger = gate.Ledger(
        gate.read_terms(terms_line(1, "openai-completions")), lines.append
    )
    for _ in range(gate.MAX_CHATTER + 100):
        ledger.refused(gate.Refused("host", 403, "x.example"))
    assert len(lines) == gate.MAX_CHATTER
    for _ in range(2):
        ledger.refused(gate.Refused("budget", 403))
    said = [line["reason"] for line in lines[gate.MAX_CHATTER :]]
    assert said == ["budget"], "what ends the job is said, and said once"
    provider = ledger._terms.providers[0]
    with ledger.booking(gate.Call(provider, "m", None, 4, gate.Meter(provider.style))):
        pass
    assert lines[-1]["event"] == "call"


def test_an_error_of_our_own_is_told_by_its_type_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def resolve(name: str, number: int) -> list[str]:
        raise RuntimeError(SECRET_TEXT)

    async def test() -> None:
        async with running(allow=["a.example"], resolve=resolve) as it:
            with contextlib.suppress(OSError, IndexError):
                await it.raw(asked_for("a.example:443"))

    go(test())
    assert capsys.readouterr() == ("", "gate: RuntimeError\n")


# ------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for localhost and its key, signed by itself, in one file."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "localhost.pem"
    path.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return path


@pytest.mark.parametrize(
    ("host", "trusted", "status"),
    [("localhost", True, 200), ("localhost", False, 502), ("127.0.0.1", True, 502)],
)
def test_a_providers_certificate_is_verified(
    certificate: Path, host: str, trusted: bool, status: int
) -> None:
    async def test() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        provider = Provider(answer(b"{}"))
        server = await asyncio.start_server(provider.serve, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        terms = json.loads(terms_line(port, "openai-completions"))
        terms["providers"]["p"]["baseUrl"] = f"https://{host}:{port}/v1"
        trust = ssl.create_default_context()
        if trusted:
            trust.load_verify_locations(certificate)
        lines: list[dict[str, Any]] = []
        limits = gate.Limits(linger=0.05)
        it = gate.Gate(
            gate.read_terms(json.dumps(terms)), lines.append, limits, tls=trust
        )
        box = Setting(provider, await it.start("127.0.0.1", 0), lines, it)
        head = (
            f"POST /{host}:{port}/v1/chat/completions HTTP/1.1\r\n{AUTH}"
            'content-length: 13\r\n\r\n{"model":"m"}'
        )
        assert (await box.raw(head.encode())).status == status
        assert len(provider.seen) == (status == 200)
        await it.stop()
        server.close()

    go(test())


# ----------------------------------------------------------------------- the process


@contextlib.contextmanager
def process(
    line: bytes, python: str = sys.executable, **how: Any
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """gate.py as it runs in a box: its stdin stays open."""
    started = subprocess.Popen(
        [python, "-I", str(SOURCE), "--host", "127.0.0.1", "--port", "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **how,
    )
    assert started.stdin is not None
    assert started.stdout is not None
    try:
        started.stdin.write(line)
        started.stdin.flush()
        first = json.loads(started.stdout.readline())
        assert first["event"] == "listening"
        yield started, first["port"]
    finally:
        started.kill()
        started.wait()
        for pipe in (started.stdin, started.stdout, started.stderr):
            assert pipe is not None
            pipe.close()


def ended(started: subprocess.Popen[bytes]) -> tuple[list[dict[str, Any]], bytes]:
    started.send_signal(signal.SIGTERM)
    assert started.wait(5) == 0
    assert started.stdout is not None
    assert started.stderr is not None
    lines = [json.loads(line) for line in started.stdout.read().splitlines()]
    return lines, started.stderr.read()


async def served_by_process(provider: Provider, line_of: Callable[[int], bytes]) -> Any:
    server = await asyncio.start_server(provider.serve, "127.0.0.1", 0)
    provider.port = server.sockets[0].getsockname()[1]
    return server, line_of(provider.port)


def test_the_process_reads_one_line_serves_and_ends_at_once_on_sigterm() -> None:
    async def hang(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(b": first\n\n"))
        await asyncio.Event().wait()

    async def test() -> None:
        server, line = await served_by_process(
            Provider(hang), lambda port: terms_line(port, "openai-completions")
        )
        port = json.loads(line)["providers"]["p"]["baseUrl"].split(":")[2].split("/")[0]
        with process(line) as (started, gate_port):
            it = Setting(Provider(hang, port=int(port)), gate_port, [], None)
            got = await it.raw(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (got.status, got.body) == (200, b"ok")
            reader, writer = await asyncio.open_connection("127.0.0.1", gate_port)
            headers = {"authorization": f"Bearer {TOKEN}", "content-length": "13"}
            head = it.head("POST", "/v1/chat/completions", headers)
            writer.write(head + b'{"model":"m"}')
            await reader.readuntil(b": first\n\n")
            lines, complaints = ended(started)
            assert [line["event"] for line in lines] == ["call"]
            assert lines[0]["estimated"] is True  # in flight, and booked all the same
            assert complaints == b""
            writer.close()
        server.close()

    go(test())


def test_nothing_the_process_says_or_shows_holds_key_token_or_body() -> None:
    """T46."""
    text = event({"x": SECRET_TEXT}) + STREAMS["openai-completions"][0]
    canaries = (KEY, TOKEN, TOKEN.lower(), SECRET_TEXT)

    async def give(writer: asyncio.StreamWriter) -> None:
        await stream(text)(writer)

    async def misuse(it: Setting) -> None:
        body = {"model": "m", "messages": SECRET_TEXT}
        own = {"authorization": f"Bearer {TOKEN}"}
        await it.ask(body=body)
        await it.ask(body=body, headers={**own, "x-pidispatch-fork": f"{TOKEN}/1"})
        await it.ask(body={**body, "model": SECRET_TEXT})
        await it.ask(f"/{TOKEN}/{SECRET_TEXT}", body)
        await it.ask(raw=b"{" + SECRET_TEXT.encode())
        await it.ask(headers={"authorization": f"Bearer {SECRET_TEXT}"})
        await it.raw(f"GET /{TOKEN} {SECRET_TEXT}\r\n\r\n".encode())
        await it.raw(f"GET http://{TOKEN}/ HTTP/1.1\r\n\r\n".encode())
        await it.raw(asked_for(f"{TOKEN}:443"))
        await it.raw(asked_for(f"{TOKEN}@{SECRET_TEXT}:443"))

    async def test() -> None:
        provider = Provider(give)
        server, line = await served_by_process(
            provider, lambda port: terms_line(port, "openai-completions")
        )
        with process(line) as (started, gate_port):
            await misuse(Setting(provider, gate_port, [], None))
            shown = Path(f"/proc/{started.pid}/cmdline").read_bytes()
            shown += Path(f"/proc/{started.pid}/environ").read_bytes()
            lines, complaints = ended(started)
            assert [line["event"] for line in lines].count("call") == 2
            assert [line["event"] for line in lines].count("refused") == 8
            said = json.dumps(lines).encode() + complaints + shown
            assert provider.seen[0].values("authorization") == [f"Bearer {KEY}"]
            for canary in canaries:
                assert canary.encode() not in said
        server.close()

    go(test())


def runs(python: str) -> bool:
    """Whether user 1001 may run this interpreter, and it is new enough."""
    command = [python, "-I", "-c", "import asyncio; asyncio.timeout"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, user=1001)
    except OSError:
        return False
    return done.returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become someone else")
def test_the_process_needs_no_rights() -> None:
    here = [sys.executable, "/usr/local/bin/python3", "/usr/bin/python3"]
    python = next(filter(runs, here), None)
    if python is None:
        pytest.skip("no interpreter for user 1001")
    line = terms_line(1, "openai-completions")
    rights = {"user": 1001, "group": 1001, "extra_groups": [], "cwd": "/"}
    with process(line, python, **rights) as (started, port):
        status = Path(f"/proc/{started.pid}/status").read_text()
        assert "CapEff:\t0000000000000000" in status
        with socket.create_connection(("127.0.0.1", port)) as box:
            box.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert box.recv(65536).endswith(b"ok")


@pytest.mark.parametrize(
    "change",
    [
        {"token": ""},
        {"token": None},
        {"allow": ["https://x"]},
        {"allow": ["127.1"]},
        {"allow": ["a b"]},
        {"allow": [7]},
        {"prices": {"p/m": {"input": 1}}},
        {"budget": "x"},
        {"providers": {"p": {}}},
        {"providers": None},
    ],
)
def test_terms_that_are_not_in_order_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        gate.read_terms(terms_line(1, "openai-completions", **change))


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("baseUrl", "ftp://x"),
        ("baseUrl", "https://"),
        ("baseUrl", "https://user:pw@x"),
        ("baseUrl", "https://x/?api-version=1"),
        ("style", "other"),
        ("authHeader", "x y"),
        ("key", "a\r\nb: c"),
    ],
)
def test_a_provider_that_is_not_in_order_is_refused(member: str, value: str) -> None:
    terms = json.loads(terms_line(1, "openai-completions"))
    terms["providers"]["p"][member] = value
    with pytest.raises((ValueError, KeyError)):
        gate.read_terms(json.dumps(terms))


def test_a_bad_line_ends_the_process_with_2_and_no_value_in_what_it_says() -> None:
    for line in (KEY.encode(), b"", b"{}\n", terms_line(1, "openai-completions")[:-9]):
        done = subprocess.run(
            [sys.executable, "-I", str(SOURCE), "--port", "0"],
            input=line,
            capture_output=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, b"")
        assert KEY.encode() not in done.stderr


def test_a_provider_without_a_key_gets_none() -> None:
    async def test() -> None:
        async with running() as it:
            terms = json.loads(terms_line(it.provider.port, "openai-completions"))
            terms["providers"]["p"]["key"] = ""
            other = gate.Gate(
                gate.read_terms(json.dumps(terms)), it.lines.append, tls=TRUST
            )
            it.port = await other.start("127.0.0.1", 0)
            assert (await it.ask()).status == 200
            assert it.provider.seen[0].values("authorization") == []
            await other.stop()

    go(test())


def test_the_file_needs_nothing_but_the_standard_library() -> None:
    for node in ast.walk(ast.parse(SOURCE.read_text())):
        names = [it.name for it in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            assert name.partition(".")[0] in sys.stdlib_module_names
