#!/usr/bin/env python3
"""The gate: the only way out of a box.

It stands between one job's container and the world. Model calls come in with the job's
token and leave with the provider's key; every call is metered and the job's token
budget is a hard stop. Everything else passes only as CONNECT to a host the operator
listed. It retries nothing, follows no redirect and says what happened in JSON lines on
stdout, in which no body, header, key or token ever stands.

Sections, bottom-up: limits, usage, meter, terms, names, bodies, messages, wires,
ledger, gate, command line. All before "wires" is pure.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import contextlib
import hmac
import ipaddress
import json
import os
import re
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

# ---------------------------------------------------------------------------- limits

MIB = 1 << 20
READ = 64 * 1024  # bytes: one read, and the largest head of a message
MAX_TERMS = 4 * MIB
MAX_EVENT = 4 * MIB  # one event, or a plain answer, kept for the usage in it
MAX_OUTLINE = 4 * MIB  # a request body whose long strings are emptied
MAX_FORKS = 256  # told apart in the running sum
MAX_CHATTER = 5000  # lines beside the meter's: a box must not rotate those away


@dataclass(frozen=True)
class Limits:
    """Bounds of one gate in seconds, bytes and counts; they fit into 256 MiB."""

    head: float = 15  # until a request's head is complete
    box: float = 300  # any one wait for the box
    dial: float = 30  # resolve, connect, shake hands
    upstream: float = 900  # a provider's silence: slow models think for minutes
    tunnel: float = 900  # silence in both directions
    linger: float = 2  # for a refused box to read why
    body: int = 64 * MIB  # all request bodies held at a time
    connections: int = 128
    calls: int = 16  # in flight, so also the most that can overshoot a budget


LIMITS = Limits()


class Refused(ValueError):
    """A message ends here: a reason of the contract, a status, a checked host name.
    Without arguments: it is not the HTTP or JSON that we accept."""

    def __init__(
        self, reason: str = "form", status: int = 400, host: str | None = None
    ) -> None:
        super().__init__(reason)
        self.reason, self.status, self.host = reason, status, host


# ----------------------------------------------------------------------------- usage
# What a provider's JSON says a call has used. `input` never holds cached tokens,
# whatever the provider's own sum does.


class Usage(NamedTuple):
    """Tokens of one call. None is "not said", which is not 0."""

    input: int | None = None
    output: int | None = None
    cache_read: int | None = None
    cache_write: int | None = None

    def updated(self, later: Usage) -> Usage:
        """These figures, replaced by each one that `later` states."""
        pairs = zip(self, later, strict=True)
        return Usage(*(old if new is None else new for old, new in pairs))

    @property
    def total(self) -> int:
        """The figure that every cap is about."""
        return sum(tokens or 0 for tokens in self)


ZERO = Usage(0, 0, 0, 0)


class Style(NamedTuple):
    """One provider API and its paths below the base URL. `{model}` in a path: the URL
    names the model, not the body. `asks`: the member of a request that makes a stream
    tell its usage."""

    name: str
    completions: tuple[str, ...]
    models: str
    asks: str = ""


GOOGLE = ("/models/{model}:generateContent", "/models/{model}:streamGenerateContent")
STYLES = {
    style.name: style
    for style in (
        Style("anthropic-messages", ("/v1/messages",), "/v1/models"),
        Style(
            "openai-completions", ("/chat/completions",), "/models", "stream_options"
        ),
        Style("openai-responses", ("/responses",), "/models"),
        Style("google-generative-ai", GOOGLE, "/models"),
        Style("mistral-conversations", ("/v1/chat/completions",), "/v1/models"),
    )
}

# Where usage stands in an event: Anthropic's start, OpenAI's responses, Groq, Moonshot,
# the rest, Google. The names in it, each the first there is.
USAGE = "message.usage response.usage x_groq.usage choices.usage usage usageMetadata"
PROMPT = "input_tokens prompt_tokens promptTokenCount"
OUTPUT = "output_tokens completion_tokens candidatesTokenCount"
TOTAL = "total_tokens totalTokenCount"
READ_APART = "cache_read_input_tokens"
WRITE_APART = "cache_creation_input_tokens"
READ_WITHIN = (
    "prompt_tokens_details.cached_tokens input_tokens_details.cached_tokens"
    " prompt_cache_hit_tokens cached_tokens num_cached_tokens cachedContentTokenCount"
)
WRITE_WITHIN = (
    "prompt_tokens_details.cache_write_tokens input_tokens_details.cache_write_tokens"
)


def at(node: object, path: str) -> object:
    """The member at a dotted path of objects (in a list: its first), or None."""
    for name in path.split("."):
        if isinstance(node, list) and node:
            node = node[0]
        node = node.get(name) if isinstance(node, dict) else None
    return node


def count(node: object, paths: str) -> int | None:
    """The first sensible token count at one of these paths."""
    for value in (at(node, path) for path in paths.split()):
        if isinstance(value, int | float) and 0 <= value < 1e15:
            return int(value)
    return None


def usage_of(style: Style, event: object) -> Usage:
    """All that one event, or a plain answer, says about its call's tokens."""
    read = _usage_apart if style.name == "anthropic-messages" else _usage_within
    usage = Usage()
    for path in USAGE.split():
        usage = usage.updated(read(at(event, path)))
    if at(event, "message.usage"):  # Anthropic's start has a placeholder for the output
        usage = usage._replace(output=None)
    return usage


def _usage_apart(node: object) -> Usage:
    names = (PROMPT, OUTPUT, READ_APART, WRITE_APART)
    return Usage(*(count(node, paths) for paths in names))


def _usage_within(node: object) -> Usage:
    """Where the prompt's figure has the cached tokens in it."""
    prompt = count(node, PROMPT)
    if prompt is None:
        return Usage()
    prompt += count(node, "toolUsePromptTokenCount") or 0
    output = (count(node, OUTPUT) or 0) + (count(node, "thoughtsTokenCount") or 0)
    # Reasoning is in every total; at xAI it is not in the output.
    output = max(output, (count(node, TOTAL) or 0) - prompt)
    read = min(count(node, READ_WITHIN) or 0, prompt)
    write = min(count(node, WRITE_WITHIN) or 0, prompt - read)
    return Usage(prompt - read - write, output, read, write)


# ----------------------------------------------------------------------------- meter
# Reads an answer as it passes, in whatever pieces it comes. Of the answer it keeps one
# event, or a plain body, up to MAX_EVENT.

LINE_END = re.compile(rb"\r\n|\r|\n")


class Meter:
    """Counts an answer's bytes and finds the usage in it. Which of the two shapes the
    answer has is told by its first byte: labels are wrong more often."""

    def __init__(self, style: Style) -> None:
        self.received = 0
        self.usage = Usage()
        self._style = style
        self._plain: bool | None = None
        self._line = bytearray()  # of an event stream, or all of a plain body
        self._data = bytearray()  # of the event so far
        self._after_cr = False
        self._over = False

    def feed(self, piece: bytes) -> None:
        self.received += len(piece)
        if self._plain is None:
            piece = piece.lstrip()
            if not piece:
                return
            self._plain = piece[:1] in b"{["
        if self._plain:
            self._grow(piece)
        else:
            self._feed_events(piece)

    def end(self) -> None:
        """The answer is over: note what a plain body or an unclosed event holds."""
        if not self._plain:
            self._feed_events(b"\n\n")
        self._note(self._line)

    def settled(self, request_bytes: int) -> tuple[Usage, bool]:
        """The call's usage, and whether any of it is estimated: a quarter of the bytes,
        where the provider did not say."""
        if self.usage.input is not None and self.usage.output is not None:
            return self.usage, False
        asked = request_bytes // 4
        answered = (request_bytes + self.received) // 4 - asked
        return Usage(asked, answered).updated(self.usage), True

    def _feed_events(self, piece: bytes) -> None:
        """Split as https://html.spec.whatwg.org (9.2.6) says; CR LF may come in two."""
        if self._after_cr and piece[:1] == b"\n":
            piece = piece[1:]
        self._after_cr = piece[-1:] == b"\r"
        first, *others = LINE_END.split(piece)
        self._grow(first)
        for text in others:
            self._end_line()
            self._grow(text)

    def _grow(self, text: bytes) -> None:
        self._over |= len(self._line) + len(self._data) + len(text) > MAX_EVENT
        if self._over:
            self._line = bytearray()
        else:
            self._line += text

    def _end_line(self) -> None:
        line, self._line = self._line, bytearray()
        if line.startswith(b"data:"):
            self._data += line[5:] + b"\n"
        elif not line:
            self._note(self._data)
            self._data, self._over = bytearray(), False

    def _note(self, text: bytearray) -> None:
        if b'"usage' not in text:  # most events: not worth parsing
            return
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(text)
            for event in found if isinstance(found, list) else [found]:
                self.usage = self.usage.updated(usage_of(self._style, event))


# ----------------------------------------------------------------------------- terms
# The host's one line on stdin, checked and typed. Its errors never hold a value.


@dataclass(frozen=True)
class Provider:
    """Where the calls for one provider go, and the header that pays for them."""

    name: str
    authority: str  # of its base URL, as it stands in the box's URLs
    tls: bool
    host: str
    port: int
    path: str
    style: Style
    header: str
    secret: str = field(repr=False)


@dataclass(frozen=True)
class Terms:
    """One job's terms: models are "provider/model", prices US dollars for a million
    tokens in the order of Usage, budget and spent tokens."""

    token: bytes = field(repr=False)
    providers: tuple[Provider, ...]
    allow: frozenset[tuple[str, int]]
    models: frozenset[str]
    prices: dict[str, tuple[float, ...]]
    budget: int | None
    spent: int

    def cost(self, model: str, usage: Usage) -> float | None:
        """US dollars, None where no price is known."""
        rates = self.prices.get(model)
        if rates is None:
            return None
        pairs = zip(rates, usage, strict=True)
        return round(sum(rate * (tokens or 0) for rate, tokens in pairs) / 1e6, 9)


PRICES = ("input", "output", "cacheRead", "cacheWrite")


def read_terms(line: bytes) -> Terms:
    """ValueError, KeyError, TypeError or AttributeError if the line is not in order."""
    raw = json.loads(line)
    if not raw["token"]:
        raise ValueError("token")
    prices = raw["prices"].items()
    return Terms(
        token=raw["token"].encode("ascii"),
        providers=tuple(_provider(*item) for item in raw["providers"].items()),
        allow=frozenset(split_authority(entry, 443) for entry in raw["allow"]),
        models=frozenset(raw["models"]),
        prices={
            model: tuple(float(it[kind]) for kind in PRICES) for model, it in prices
        },
        budget=None if raw["budget"] is None else int(raw["budget"]),
        spent=int(raw["spent"]),
    )


def _provider(name: str, raw: dict[str, str]) -> Provider:
    url = urlsplit(raw["baseUrl"])
    header = f"{raw['authHeader']}: {raw['authPrefix']}{raw['key']}"
    if url.scheme not in ("http", "https") or not url.hostname or "@" in url.netloc:
        raise ValueError("baseUrl")
    if url.query or url.fragment:
        raise ValueError("baseUrl")
    if not FIELD.fullmatch(header):
        raise ValueError("authHeader or key")
    return Provider(
        name=name,
        authority=url.netloc.lower(),
        tls=url.scheme == "https",
        host=url.hostname,
        port=url.port or {"http": 80, "https": 443}[url.scheme],
        path=url.path.rstrip("/"),
        style=STYLES[raw["style"]],
        header=raw["authHeader"].lower(),
        secret=raw["authPrefix"] + raw["key"] if raw["key"] else "",
    )


# ----------------------------------------------------------------------------- names
# A CONNECT target is compared with the operator's list as a name before anything is
# resolved; then its addresses are judged, and those very addresses are connected to.

AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:@/?#\[\]]+)(?::([1-9][0-9]{0,4}))?")
LABEL = r"(?!-)[a-z0-9_-]{1,63}(?<!-)"
NAME = re.compile(rf"(?=.{{1,253}}$){LABEL}(?:\.{LABEL})*")
NUMERIC = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# Instance metadata that no address class gives away: Alibaba, Azure, AWS.
METADATA = frozenset({"100.100.100.200", "168.63.129.16", "fd00:ec2::254"})


def split_authority(text: str, port: int | None) -> tuple[str, int]:
    """The host and port of "host[:port]" in the one spelling that is compared: lower
    case, ASCII, no last dot. ValueError for all but a plain name, a dotted quad or an
    IPv6 address in brackets: no user, no 127.1, no 0x7f000001."""
    match = AUTHORITY.fullmatch(text)
    port = int(match[2]) if match and match[2] else port
    if match is None or port is None or port > 65535:
        raise ValueError("authority")
    if match[1].startswith("["):
        return str(ipaddress.IPv6Address(match[1][1:-1])), port
    host = match[1].lower()
    host = (host if host.isascii() else host.encode("idna").decode()).removesuffix(".")
    if not NAME.fullmatch(host):
        raise ValueError("authority")
    # To a resolver a name that ends in a number is an address, so it has to be one.
    return str(ipaddress.IPv4Address(host)) if NUMERIC.fullmatch(host) else host, port


def may_connect(host: str, address: str) -> bool:
    """Whether listing `host` lets a box reach `address`. By its name the operator means
    a host, an intranet's too; nobody means the gate itself, the link's neighbours or
    the cloud's metadata by a name, so these have to be listed as addresses."""
    if ":" in host or NUMERIC.fullmatch(host):
        return True
    real = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(real, ipaddress.IPv6Address):
        inner = int(real) & 0xFFFFFFFF if real in NAT64 else None
        inside = ipaddress.IPv4Address(inner) if inner is not None else None
        real = inside or real.ipv4_mapped or real.sixtofour or real
    if host == "localhost" or host.endswith(".localhost"):
        return real.is_loopback
    unfit = real.is_loopback or real.is_link_local or real.is_multicast
    unfit = unfit or real.is_unspecified or real.is_reserved
    return not unfit and str(real) not in METADATA


# ---------------------------------------------------------------------------- bodies
# What a request asks for, read without building it in memory: a box may send 64 MiB.

# It matches at every quote that opens a string, closed or not: no text is read twice.
STRING = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
COLON = re.compile(rb"[ \t\r\n]*:")
LONG = 256  # bytes; longer than any model id
STREAM_OPTIONS = re.compile(
    rb'"stream_options"\s*:\s*(null|\{(?:[^{}"]|' + STRING.pattern + rb")*+\})?"
)
# Members that choose a model or a way to answer. Some servers take names in any case.
TELLING = frozenset(
    {"model", "models", "fallbacks", "background", "stream", "stream_options"}
)


def outline(body: bytearray) -> dict[str, object]:
    """A JSON body with its long strings emptied. Refused unless it is one object in
    UTF-8 without doubled names, so that no server can read another one in it."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(body) + 1, MIB):
            decoder.decode(body[start : start + MIB], start + MIB > len(body))
        fields = json.loads(_shortened(body).decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise Refused from None
    if not isinstance(fields, dict):
        raise Refused
    if any(name.casefold() in TELLING - {name} for name in fields):
        raise Refused
    return fields


def _shortened(body: bytearray) -> bytearray:
    short, done = bytearray(), 0
    for match in STRING.finditer(body):
        start, end = match.span()
        if len(short) + start - done > MAX_OUTLINE:
            break
        if end - start > LONG and not COLON.match(body, end):
            short += body[done:start] + b'""'
            done = end
    if len(short) + len(body) - done > MAX_OUTLINE:
        raise Refused
    return short + body[done:]


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise Refused
    return members


def models_asked(fields: dict[str, object]) -> list[object]:
    """All that may answer a request: besides `model` OpenRouter's `models` and
    Anthropic's `fallbacks`, which could be dearer."""
    asked = [fields["model"]] if "model" in fields else []
    for name in ("models", "fallbacks"):
        others = fields.get(name) or []
        listed = others if isinstance(others, list) else [others]
        asked += [at(it, "model") if isinstance(it, dict) else it for it in listed]
    return asked


def ask_for_usage(body: bytearray, fields: dict[str, object]) -> None:
    """Set stream_options.include_usage in a streaming body; no other byte changes."""
    options = fields.get("stream_options")
    if not fields.get("stream") or at(options, "include_usage") is True:
        return
    if "stream_options" not in fields:
        start = body.index(b"{") + 1
        body[start:start] = b'"stream_options":{"include_usage":true},'
        return
    found = list(STREAM_OPTIONS.finditer(body))
    if len(found) != 1 or found[0][1] is None:
        raise Refused  # written so that it cannot be told which one counts
    wanted = {**(json.loads(found[0][1]) or {}), "include_usage": True}
    body[slice(*found[0].span(1))] = json.dumps(wanted).encode()


# -------------------------------------------------------------------------- messages
# HTTP/1.1 (RFC 9112) and strict: what two readers could frame differently is refused.
# There is one request a connection, so nothing hides behind it.

REQUEST = re.compile(r"([A-Z]{1,16}) ([!-~]+) HTTP/(1\.[01])")
ANSWER = re.compile(r"HTTP/1\.[01] (([1-5][0-9][0-9])(?: [\t -~\x80-\xff]*)?)")
FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t -~\x80-\xff]*)")
LENGTH = re.compile(r"[0-9]{1,15}")
CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?\r\n")
FORK_HEADER = "x-pidispatch-fork"
FORK = re.compile(r"[A-Za-z0-9._:|+=-]{1,256}/[A-Za-z0-9._-]{1,64}")
# Where clients put keys: all are cleared, for no other account is used through us.
CREDENTIALS = frozenset(
    {"authorization", "proxy-authorization", "cookie"}
    | {"x-api-key", "x-goog-api-key", "api-key"}
)
HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-connection", "proxy-authenticate", "te"}
    | {"trailer", "upgrade", "transfer-encoding", "content-length"}
)


class Head(NamedTuple):
    """A message's head: the groups of its first line, and its fields."""

    start: tuple[str, ...]
    fields: tuple[tuple[str, str], ...]

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.fields if key == name]

    def passed_on(self, less: Iterable[str] = ()) -> list[tuple[str, str]]:
        """The fields meant for the other end, without the names in `less`."""
        hops = ",".join(self.values("connection")).lower().split(",")
        drop = HOP_BY_HOP.union(less, (name.strip() for name in hops))
        return [pair for pair in self.fields if pair[0] not in drop]

    def length(self) -> int | None:
        """The body's bytes, -1 when it is chunked, None when nothing is said."""
        lengths = self.values("content-length")
        codings = [coding.lower() for coding in self.values("transfer-encoding")]
        if len(lengths) + len(codings) > 1 or codings not in ([], ["chunked"]):
            raise Refused
        if not all(LENGTH.fullmatch(length) for length in lengths):
            raise Refused
        return -1 if codings else int(lengths[0]) if lengths else None


def parse_head(block: bytes, first: re.Pattern[str]) -> Head:
    """A head with its blank line. CR and LF only together, names without spaces, no
    folded lines."""
    start, *lines = block[:-4].decode("latin-1").split("\r\n")
    begun = first.fullmatch(start)
    found = [FIELD.fullmatch(line) for line in lines]
    if begun is None or None in found:
        raise Refused
    pairs = ((it[1].lower(), it[2].strip(" \t")) for it in found if it)
    return Head(begun.groups(), tuple(pairs))


def render_head(start: str, fields: Iterable[tuple[str, str]]) -> bytes:
    lines = [start, *(f"{name}: {value}" for name, value in fields), "", ""]
    return "\r\n".join(lines).encode("latin-1")


def split_query(query: str) -> tuple[str, list[str]]:
    """A query without its `key` parameters, with its "?", and what those held."""
    parts = [part for part in query.split("&") if part]
    keys = {part for part in parts if unquote(part).partition("=")[0] == "key"}
    rest = "&".join(part for part in parts if part not in keys)
    return "?" * bool(rest) + rest, [unquote(key).partition("=")[2] for key in keys]


def model_in(template: str, path: str) -> str | None:
    """The model that a path names; "" if its template has none, None if it differs."""
    before, mark, after = template.partition("{model}")
    if not mark:
        return "" if path == template else None
    model = path.removeprefix(before).removesuffix(after)
    return model if model and path == before + model + after else None


# ----------------------------------------------------------------------------- wires


def complain(error: object) -> None:
    """On stderr and by type alone: the text of an exception may hold what was sent."""
    print(f"gate: {type(error).__name__}", file=sys.stderr, flush=True)


async def resolve(host: str, port: int) -> list[str]:
    """A host's addresses, each once; OSError when it has none."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in found))


class Wire:
    """One connection. Each wait on it ends in TimeoutError after `patience` seconds."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        patience: float,
    ) -> None:
        self.reader, self.writer, self.patience = reader, writer, patience
        self._left = False

    async def head(self, first: re.Pattern[str]) -> Head:
        return parse_head(await self._until(b"\r\n\r\n"), first)

    async def body(self, length: int | None) -> AsyncIterator[bytes]:
        """A body's pieces as they come, framed as Head.length says, None: until the end
        of the connection. EOFError when it stops short."""
        if length is None:
            while piece := await self._read(READ):
                yield piece
            return
        size = length if length >= 0 else await self._chunk()
        while size:
            piece = await self._read(min(size, READ))
            if not piece:
                raise EOFError
            yield piece
            size -= len(piece)
            if not size and length < 0:
                size = await self._chunk(b"\r\n")
        if length < 0:
            while await self._until(b"\r\n") != b"\r\n":
                pass  # trailers, passed on to nobody

    async def send(self, data: bytes | bytearray) -> None:
        """Write bit by bit, so that never more than a bit is copied."""
        for start in range(0, len(data), READ):
            self.writer.write(data[start : start + READ])
            async with asyncio.timeout(self.patience):
                await self.writer.drain()

    async def tell(self, data: bytes) -> None:
        """Send to a box that may hang up. The rest of an answer then goes nowhere, but
        it is paid for, so it is still read and metered."""
        if self._left:
            return
        try:
            await self.send(data)
        except OSError:
            self._left = True
            self.abort()

    async def linger(self, seconds: float) -> None:
        """End our side and read the other's to its end: a close with bytes unread would
        reset the connection and take the answer back."""
        self.writer.write_eof()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while await self.reader.read(READ):
                    pass

    def close(self) -> None:
        self.writer.close()

    def abort(self) -> None:
        """Close at once, whatever has not been read."""
        self.writer.transport.abort()

    async def _read(self, size: int) -> bytes:
        async with asyncio.timeout(self.patience):
            return await self.reader.read(size)

    async def _until(self, mark: bytes) -> bytes:
        async with asyncio.timeout(self.patience):
            try:
                return await self.reader.readuntil(mark)
            except asyncio.LimitOverrunError:
                raise Refused from None

    async def _chunk(self, before: bytes = b"") -> int:
        """The next chunk's size, after the line end of the one before."""
        if before and await self._until(before) != before:
            raise Refused
        match = CHUNK.fullmatch(await self._until(b"\r\n"))
        if match is None:
            raise Refused
        return int(match[1], 16)


async def pump(source: Wire, sink: Wire, quiet: asyncio.Timeout, idle: float) -> None:
    """Bytes one way until they end, which is passed on; each puts off the time-out."""
    while piece := await source.reader.read(READ):
        sink.writer.write(piece)
        await sink.writer.drain()
        quiet.reschedule(asyncio.get_running_loop().time() + idle)
    sink.writer.write_eof()


# ---------------------------------------------------------------------------- ledger
# What has been used, and every line that is written.

Emit = Callable[[dict[str, object]], None]


@dataclass(eq=False)
class Call:
    """One model call. `answer` is the provider's status, None without one; `status` is
    what the box got."""

    provider: Provider
    model: str
    fork: str | None
    request_bytes: int
    meter: Meter
    started: float = field(default_factory=time.monotonic)
    sent: bool = False
    answer: int | None = None
    status: int = 502

    def settled(self) -> tuple[Usage, bool]:
        """Tokens, and whether they are estimated. What a provider refuses costs
        nothing; what was sent and never answered may."""
        if not self.sent if self.answer is None else self.answer >= 300:
            return ZERO, False
        self.meter.end()
        return self.meter.settled(self.request_bytes)


@dataclass
class Sum:
    """Running totals. `cost` is None once a call had no price: it is never too low."""

    calls: int = 0
    usage: Usage = ZERO
    cost: float | None = 0.0
    estimated: int = 0

    def add(self, usage: Usage, cost: float | None, estimated: bool) -> None:
        pairs = zip(self.usage, usage, strict=True)
        self.usage = Usage(*((old or 0) + (new or 0) for old, new in pairs))
        priced = None not in (self.cost, cost)
        self.cost = round((self.cost or 0) + (cost or 0), 9) if priced else None
        self.calls += 1
        self.estimated += estimated


def tokens(usage: Usage) -> dict[str, object]:
    """A usage as lines spell it."""
    figures = (figure or 0 for figure in usage)
    return {**dict(zip(PRICES, figures, strict=True)), "total": usage.total}


class Ledger:
    """Books calls and writes lines. The sum is of this gate's life; the budget counts
    what was spent before it as well."""

    def __init__(self, terms: Terms, emit: Emit) -> None:
        self._terms, self._emit = terms, emit
        self._sum = Sum()
        self._forks: dict[str, Sum] = {}
        self._open: list[Call] = []
        self._chatter = 0
        self._told_spent = False

    def exhausted(self) -> bool:
        """Whether the budget is gone, with what calls in flight are known to have used:
        a client may go on before the last byte of an answer."""
        spent = self._terms.spent + self._sum.usage.total
        spent += sum(call.meter.usage.total for call in self._open)
        return self._terms.budget is not None and spent >= self._terms.budget

    @contextlib.contextmanager
    def booking(self, call: Call) -> Iterator[None]:
        """Book a call when it ends, however it ends."""
        self._open.append(call)
        try:
            yield
        finally:
            self._open.remove(call)
            self._book(call)

    def _book(self, call: Call) -> None:
        usage, estimated = call.settled()
        fork = self._harmless(call.fork)
        cost = self._terms.cost(f"{call.provider.name}/{call.model}", usage)
        self._sum.add(usage, cost, estimated)
        if fork:
            known = fork in self._forks or len(self._forks) < MAX_FORKS
            name = fork if known else "other"
            self._forks.setdefault(name, Sum()).add(usage, cost, estimated)
        line = {
            "event": "call",
            "n": self._sum.calls,
            "provider": call.provider.name,
            "model": call.model,
            "style": call.provider.style.name,
            "status": call.status,
            **tokens(usage),
            "cost": cost,
            "estimated": estimated,
            "fork": fork,
            "ms": round((time.monotonic() - call.started) * 1000),
            "sum": self._totals(),
        }
        self._emit(line)

    def refused(self, refusal: Refused) -> None:
        host = self._harmless(refusal.host)
        line: dict[str, object] = {"event": "refused", "reason": refusal.reason}
        line["host"] = host
        if refusal.reason == "budget" and not self._told_spent:
            self._told_spent = True  # it ends the job, so no chatter may hide it
            self._emit(line)
        else:
            self._chat(line)

    def connected(self, host: str, port: int) -> None:
        self._chat({"event": "connect", "host": host, "port": port})

    def _harmless(self, text: str | None) -> str | None:
        """What the box wrote, unless it wrote its token."""
        token = self._terms.token.decode().lower()
        return None if text and token in text.lower() else text

    def _chat(self, line: dict[str, object]) -> None:
        self._chatter += 1
        if self._chatter <= MAX_CHATTER:
            self._emit(line)

    def _totals(self) -> dict[str, object]:
        forks = {
            name: {"calls": it.calls, "total": it.usage.total, "cost": it.cost}
            for name, it in self._forks.items()
        }
        return {
            "calls": self._sum.calls,
            **tokens(self._sum.usage),
            "cost": self._sum.cost,
            "estimated": self._sum.estimated,
            "forks": forks,
        }


# ------------------------------------------------------------------------------ gate

Resolve = Callable[[str, int], Awaitable[list[str]]]
Route = tuple[Provider, str]  # with the model that the path names, or ""


class Gate:
    """The server of one job. `resolve` and `tls` are given by tests."""

    def __init__(
        self,
        terms: Terms,
        emit: Emit,
        limits: Limits = LIMITS,
        resolve: Resolve = resolve,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._terms, self._limits = terms, limits
        self._ledger = Ledger(terms, emit)
        self._resolve = resolve
        self._tls = tls or ssl.create_default_context()
        self._calls = asyncio.Semaphore(limits.calls)
        self._bodies: dict[int, bytearray] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen; the port is the system's choice when `port` is 0."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=READ)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Take no more, and book what is in flight as far as it went."""
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        box = Wire(reader, writer, self._limits.box)
        try:
            if len(self._tasks) > self._limits.connections:
                raise ConnectionRefusedError
            await self._answer(box)
        except (OSError, EOFError, asyncio.CancelledError):
            box.abort()  # it hung up, stalls, is one too many, or the gate ends
        except Exception as error:  # the loop's edge
            complain(error)
            box.abort()
        finally:
            self._tasks.discard(task)
            box.close()

    async def _answer(self, box: Wire) -> None:
        try:
            await self._dispatch(box)
        except Refused as refusal:
            self._ledger.refused(refusal)
            await self._reply(box, refusal.status, refusal.reason)

    async def _reply(self, box: Wire, status: int, reason: str) -> None:
        """An error of ours in a form that the client of every style can read."""
        text = f"the job's gate says no: {reason}"
        error = {"type": f"pidispatch_{reason}", "message": text}
        body = json.dumps({"type": "error", "error": error}).encode()
        await self._finish(box, status, "application/json", body)

    async def _finish(self, box: Wire, status: int, kind: str, body: bytes) -> None:
        fields = [("content-type", kind), ("content-length", str(len(body)))]
        fields.append(("connection", "close"))
        await box.send(render_head(f"HTTP/1.1 {status} ", fields) + body)
        await box.linger(self._limits.linger)

    async def _dispatch(self, box: Wire) -> None:
        try:
            async with asyncio.timeout(self._limits.head):
                head = await box.head(REQUEST)
        except TimeoutError:
            raise Refused("form", 408) from None
        method, target, version = head.start
        if method == "CONNECT":
            await self._tunnel(box, head)
        elif not target.startswith("/") or "#" in target or version != "1.1":
            raise Refused
        elif (method, target) == ("GET", "/healthz"):
            await self._finish(box, 200, "text/plain", b"ok")
        else:
            await self._model(box, head)

    # other traffic

    async def _tunnel(self, box: Wire, head: Head) -> None:
        try:
            host, port = split_authority(head.start[1], None)
        except ValueError:
            raise Refused from None
        if head.length():
            raise Refused
        if (host, port) not in self._terms.allow:
            raise Refused("host", 403, host)
        try:
            async with asyncio.timeout(self._limits.dial):
                addresses = await self._resolve(host, port)
                if not all(may_connect(host, address) for address in addresses):
                    raise Refused("address", 403, host)
                far = await self._dial(addresses, port)
        except OSError:
            await self._reply(box, 502, "unreachable")
            return
        self._ledger.connected(host, port)
        try:
            await box.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await self._splice(box, far)
        finally:
            far.close()

    async def _dial(self, addresses: list[str], port: int) -> Wire:
        """The first of these addresses that answers. No name is resolved again."""
        failure = OSError("no address")
        for address in addresses:
            try:
                pair = await asyncio.open_connection(address, port, limit=READ)
                return Wire(*pair, self._limits.tunnel)
            except OSError as error:
                failure = error
        raise failure

    async def _splice(self, box: Wire, far: Wire) -> None:
        idle = self._limits.tunnel
        async with asyncio.timeout(idle) as quiet:
            try:
                async with asyncio.TaskGroup() as ways:
                    ways.create_task(pump(box, far, quiet, idle))
                    ways.create_task(pump(far, box, quiet, idle))
            except* OSError:
                pass  # one end broke off, so the other is closed as well

    # model calls

    async def _model(self, box: Wire, head: Head) -> None:
        method, target, _ = head.start
        path, _, query = target.partition("?")
        query, keys = split_query(query)
        self._check_token(head, keys)
        authority, _, path = path[1:].partition("/")
        routes = self._routes(method, authority.lower(), f"/{path}")
        if method == "POST":
            await self._post(box, head, routes, f"/{path}{query}")
            return
        if head.length():
            raise Refused
        call = Call(routes[0][0], "", None, 0, Meter(routes[0][0].style))  # not booked
        await self._exchange(box, head, call, f"/{path}{query}", bytearray())

    def _check_token(self, head: Head, keys: list[str]) -> None:
        """In constant time for each value that the box may have meant as its key."""
        names = CREDENTIALS.union(it.header for it in self._terms.providers)
        keys = keys + [value for name, value in head.fields if name in names]
        bare = [re.sub(r"(?i)^bearer +", "", key) for key in keys]
        offers = [key.encode(errors="replace") for key in bare]
        if not any(hmac.compare_digest(offer, self._terms.token) for offer in offers):
            raise Refused("token", 403)

    def _routes(self, method: str, authority: str, path: str) -> list[Route]:
        """The providers behind this path, if it is one that the box may use at all."""
        found: dict[str, list[Route]] = {"GET": [], "POST": []}
        for it in self._terms.providers:
            if it.authority != authority:
                continue
            if path == it.path + it.style.models:
                found["GET"].append((it, ""))
            for template in it.style.completions:
                model = model_in(it.path + template, path)
                if model is not None:
                    found["POST"].append((it, model))
        if not any(found.values()):
            raise Refused("path", 403)
        if not found.get(method):
            raise Refused("method", 403)
        return found[method]

    async def _post(
        self, box: Wire, head: Head, routes: list[Route], target: str
    ) -> None:
        body = bytearray()
        self._bodies[id(body)] = body
        try:
            await self._receive(box, head, body)
            fields = outline(body)
            provider, model = self._allowed(routes, fields)
            if provider.style.asks:
                ask_for_usage(body, fields)
            fork = next(filter(FORK.fullmatch, head.values(FORK_HEADER)), None)
            async with self._calls:
                if self._ledger.exhausted():
                    raise Refused("budget", 403)
                meter = Meter(provider.style)
                call = Call(provider, model, fork, len(body), meter)
                with self._ledger.booking(call):
                    await self._exchange(box, head, call, target, body)
        finally:
            del self._bodies[id(body)]

    async def _receive(self, box: Wire, head: Head, body: bytearray) -> None:
        length = head.length()
        if length is None:
            raise Refused
        if length > self._limits.body:
            raise Refused("form", 413)
        if head.values("expect"):
            await box.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        async for piece in box.body(length):
            body += piece
            if sum(map(len, self._bodies.values())) > self._limits.body:
                raise Refused("form", 413 if len(body) > self._limits.body else 503)

    def _allowed(self, routes: list[Route], fields: dict[str, object]) -> Route:
        """The provider that may be asked, and the model it is asked for."""
        if fields.get("background"):
            raise Refused("form", 403)  # it would run on, unmetered
        for provider, named in routes:
            model = named or fields.get("model")
            asked = {f"{provider.name}/{it}" for it in [model, *models_asked(fields)]}
            if isinstance(model, str) and asked <= self._terms.models:
                return provider, model
        raise Refused("model", 403)

    async def _exchange(
        self, box: Wire, head: Head, call: Call, target: str, body: bytearray
    ) -> None:
        far = None
        try:
            far = await self._reach(call.provider)
            # A provider may answer early and read no more: then the answer tells why.
            with contextlib.suppress(OSError):
                await far.send(self._request(call.provider, head, target, body))
                await far.send(body)
                call.sent = True
            answer = await far.head(ANSWER)
            while answer.start[1].startswith("1"):
                answer = await far.head(ANSWER)
            call.answer = call.status = int(answer.start[1])
            await self._relay(far, answer, box, call.meter)
        except (OSError, EOFError, Refused) as error:
            if call.answer is not None:
                return  # closed without its end, a broken answer looks broken
            call.status = 504 if isinstance(error, TimeoutError) else 502
            await self._reply(box, call.status, "upstream")
        finally:
            if far:
                far.close()

    async def _reach(self, provider: Provider) -> Wire:
        tls = self._tls if provider.tls else None
        async with asyncio.timeout(self._limits.dial):
            pair = await asyncio.open_connection(
                provider.host, provider.port, ssl=tls, limit=READ
            )
        return Wire(*pair, self._limits.upstream)

    def _request(
        self, provider: Provider, head: Head, target: str, body: bytearray
    ) -> bytes:
        """The box's request head as the provider gets it."""
        ours = {provider.header, FORK_HEADER, "host", "expect", "accept-encoding"}
        fields = [("host", provider.authority), *head.passed_on(CREDENTIALS | ours)]
        fields += [("accept-encoding", "identity"), ("connection", "close")]
        if provider.secret:
            fields.append((provider.header, provider.secret))
        if body:
            fields.append(("content-length", str(len(body))))
        return render_head(f"{head.start[0]} {target} HTTP/1.1", fields)

    async def _relay(self, far: Wire, head: Head, box: Wire, meter: Meter) -> None:
        """The answer as it comes; only its framing is ours."""
        length = 0 if head.start[1] in ("204", "304") else head.length()
        whole = length is not None and length >= 0
        framing = ("content-length", str(length))
        fields = [framing if whole else ("transfer-encoding", "chunked")]
        fields += [*head.passed_on(), ("connection", "close")]
        await box.tell(render_head(f"HTTP/1.1 {head.start[0]}", fields))
        async for piece in far.body(length):
            meter.feed(piece)
            await box.tell(piece if whole else b"%x\r\n%b\r\n" % (len(piece), piece))
        if not whole:
            await box.tell(b"0\r\n\r\n")


# ---------------------------------------------------------------------- command line


def emit(line: dict[str, object]) -> None:
    """Write one line. A gate that cannot write its meter must not spend on."""
    try:
        print(json.dumps(line, separators=(",", ":")), flush=True)
    except OSError:
        os._exit(1)


async def run(terms: Terms, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT."""
    gate, ended, loop = Gate(terms, emit), asyncio.Event(), asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, what: complain(what.get("exception")))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    emit({"event": "listening", "port": await gate.start(host, port)})
    await ended.wait()
    await gate.stop()
    os._exit(0)  # at once: a name still being resolved would keep its thread alive


def main() -> int:
    parser = argparse.ArgumentParser(description="The gate of one job's box.")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8080)
    args = parser.parse_args()
    try:
        terms = read_terms(sys.stdin.buffer.readline(MAX_TERMS))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        complain(error)
        return 2
    asyncio.run(run(terms, args.host, args.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
