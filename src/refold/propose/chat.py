"""Models over HTTP, in the two common styles of chat endpoints.

The key comes from the environment and goes into one header. It is in no message, record or exception. Answers are
streamed, so a slow model is not mistaken for a dead one. If a stream ends early, the request is repeated. After
temporary errors (rate limits, overload, broken connections), the request is repeated later, within the budget of time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..errors import ArgumentError, MissingDependency, ProposerError
from . import prompt
from .protocol import Proposal, Proposer, Request

_sleep = time.sleep
_PASSING = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_LONGEST_WAIT_S = 60.0
_ANSWER_LIMIT = 8 << 20  # bytes, with what is around the words
_ENCODINGS = {"", "identity", "gzip"}  # of answers; one, not several in each other


@dataclass(frozen=True)
class Style:
    """How one kind of endpoint is spoken to.

    Attributes:
        path: Added to the base URL.
        key: The variable in the environment that holds the key.
        base_url: Where it is, unless the user says otherwise; empty if the user must.
        headers: Made from the key.
        body: Made from model, system words, question and the longest answer in tokens.
        read: What one event of the stream says: text, tokens in, tokens out, whether the answer is whole.
    """

    path: str
    key: str
    base_url: str
    headers: Callable[[str], dict[str, str]]
    body: Callable[[str, str, str, int], dict[str, Any]]
    read: Callable[[dict[str, Any]], _Piece]


@dataclass(frozen=True)
class _Piece:
    text: str = ""
    tokens_in: int = 0
    tokens_out: int = 0
    done: bool = False


class _Passing(Exception):
    """An error that may not come again."""

    def __init__(self, reason: str, wait: float = 0.0):
        super().__init__(reason)
        self.wait = wait


def _openai_body(model: str, system: str, question: str, longest: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    # No limit on tokens: servers disagree about its name, and the answer is limited where it is read.
    return {"model": model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}


def _openai_read(event: dict[str, Any]) -> _Piece:
    if event.get("error"):
        raise _Passing(f"it answers with an error: {str(event['error'])[:300]}")
    usage = event.get("usage") or {}
    choice = (event.get("choices") or [{}])[0]
    said = choice.get("delta") or choice.get("message") or {}  # a message: from servers that do not stream
    used = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    return _Piece(_text(said.get("content")), *used, done=choice.get("finish_reason") is not None)


def _text(content: Any) -> str:
    """Return the text of a content: a string, or a list of parts of which some are text."""
    if isinstance(content, list):
        return "".join(_text(part.get("text")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _count(tokens: Any) -> int:
    """Return a number of tokens; nothing that an endpoint says of them gives a budget back."""
    if tokens is None:
        return 0
    if not isinstance(tokens, (int, float)) or not 0 <= tokens < 1e12:
        raise ValueError(f"{str(tokens)[:50]} is no number of tokens")
    return math.ceil(tokens)


def _anthropic_body(model: str, system: str, question: str, longest: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": model, "system": system, "messages": messages, "max_tokens": longest, "stream": True}


def _anthropic_read(event: dict[str, Any]) -> _Piece:
    kind = event.get("type")
    if kind == "error" or event.get("error"):
        raise _Passing(f"it answers with an error: {str(event.get('error'))[:300]}")
    if kind == "message_start":
        usage = (event.get("message") or {}).get("usage") or {}
        return _Piece(tokens_in=_count(usage.get("input_tokens")))
    if kind == "content_block_delta":
        return _Piece(_text((event.get("delta") or {}).get("text")))
    usage = event.get("usage") or {}
    if kind == "message_delta":
        return _Piece(tokens_out=_count(usage.get("output_tokens")))
    if kind == "message":  # from servers that do not stream
        used = _count(usage.get("input_tokens")), _count(usage.get("output_tokens"))
        return _Piece(_text(event.get("content")), *used, done=True)
    return _Piece(done=kind == "message_stop")


STYLES = {
    "openai": Style(
        "/chat/completions",
        "OPENAI_API_KEY",
        "",
        lambda key: {"Authorization": f"Bearer {key}"} if key else {},
        _openai_body,
        _openai_read,
    ),
    "anthropic": Style(
        "/v1/messages",
        "ANTHROPIC_API_KEY",
        "https://api.anthropic.com",
        lambda key: {"x-api-key": key, "anthropic-version": "2023-06-01"},
        _anthropic_body,
        _anthropic_read,
    ),
}


class Chat(Proposer):
    """A model that an HTTP endpoint serves.

    Args:
        style: ``openai`` (any server that speaks that protocol) or ``anthropic``.
        model: The model's name there.
        base_url: The address; required for ``openai``.
        longest: The most tokens of one answer, where the style has a name for it.
        tries: How often one question is asked, if errors pass.
        idle: Seconds without a byte after which a stream counts as broken.
        seconds: Seconds that one question may take, with all its tries.
        prices: Money for a million tokens, in and out, to keep a budget by.
    """

    def __init__(
        self, style: str, model: str, *, base_url: str = "", longest: int = 16384, tries: int = 5, idle: float = 120.0,
        seconds: float = 900.0, prices: tuple[float, float] = (0.0, 0.0),
    ):  # fmt: skip
        if style not in STYLES:
            raise ArgumentError(f"style must be one of {', '.join(STYLES)}, not {style!r}")
        self._style = STYLES[style]
        self._url = (base_url or self._style.base_url).rstrip("/") + self._style.path
        host = urlsplit(self._url)
        if host.scheme not in ("http", "https") or not host.hostname:
            raise ArgumentError(
                f"base_url must be the http address of a chat endpoint, as http://127.0.0.1:8000/v1, not {base_url!r}; "
                "say it with --base-url"
            )
        if host.username or host.password:
            raise ArgumentError(f"base_url must hold no password; put the key into {self._style.key}")
        self.name = f"{style}:{model}"
        self.destination = f"{host.scheme}://{host.netloc}"
        self._model, self._longest, self._tries, self._idle, self._seconds = model, longest, tries, idle, seconds
        self._prices = prices
        self._tokens, self._lock = [0, 0], threading.Lock()
        try:
            import httpx
        except ImportError as error:
            raise MissingDependency("chat endpoints need httpx: pip install 'refold[propose]'") from error
        self._httpx = httpx

    def propose(self, request: Request) -> Sequence[Proposal]:
        """Ask as often as proposals are wanted, at the same time."""
        question = prompt.question(request)
        deadline = time.monotonic() + min(self._seconds, request.seconds or math.inf)
        with ThreadPoolExecutor(max(request.wanted, 1)) as pool:
            asked = [pool.submit(self._ask, question, deadline) for _ in range(request.wanted)]
        texts, errors = [], []
        for each in asked:
            try:
                texts.append(each.result())
            except ProposerError as error:
                errors.append(error)
        if errors and not texts:
            raise errors[0]
        return [proposal for text in texts for proposal in prompt.answers(text) or [Proposal("", text[:1000])]]

    def spent(self) -> dict[str, float]:
        """Return the tokens that the endpoint counted, and what they cost by the given prices."""
        money = sum(n * price for n, price in zip(self._tokens, self._prices, strict=True)) / 1e6
        return {"tokens": float(sum(self._tokens)), "money": money}

    def _ask(self, question: str, deadline: float) -> str:
        """Return one answer, after as many tries as it takes."""
        for turn in range(self._tries):
            try:
                return self._stream(question, deadline)
            except _Passing as error:
                reason = str(error)
                wait = min(error.wait or random.uniform(0.5, 1.0) * 2**turn, _LONGEST_WAIT_S)
            if turn + 1 == self._tries or time.monotonic() + wait > deadline:
                break
            _sleep(wait)
        raise ProposerError(f"{self.name} at {self.destination} gave no whole answer after {turn + 1} tries: {reason}")

    def _stream(self, question: str, deadline: float) -> str:
        httpx = self._httpx
        key = self._secret()
        body = self._style.body(self._model, prompt.system(), question, self._longest)
        parts, whole = [], False
        try:
            with (
                httpx.Client(
                    timeout=httpx.Timeout(self._idle, connect=15.0),
                    follow_redirects=False,
                    headers={"Accept-Encoding": "gzip"},
                ) as client,
                _Cut(deadline) as cut,
                client.stream(
                    "POST", self._url, json=body, headers=self._style.headers(key), extensions={"trace": cut}
                ) as response,
            ):
                self._check(response)
                for event in _events(self._lines(response, deadline)):
                    piece = self._style.read(event)
                    with self._lock:
                        self._tokens[0] += piece.tokens_in
                        self._tokens[1] += piece.tokens_out
                    parts.append(piece.text)
                    whole |= piece.done
        except (httpx.TransportError, zlib.error) as error:
            if time.monotonic() < deadline:
                raise _Passing(f"{type(error).__name__}: {self._masked(str(error))}") from None
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
            reason = f"its answer cannot be read ({type(error).__name__}: {self._masked(str(error))[:300]})"
            raise _Passing(reason) from None
        if not whole:
            late = time.monotonic() >= deadline
            raise _Passing("it takes longer than it may" if late else "its answer was cut off")
        return self._masked("".join(parts))

    def _secret(self) -> str:
        key = os.environ.get(self._style.key, "").strip()
        if not all("!" <= letter <= "~" for letter in key):
            # The library that sends headers would show it in its error.
            raise ProposerError(f"{self._style.key} holds spaces or letters that no key has")
        return key

    def _masked(self, text: str) -> str:
        """Take the key out of what an endpoint or a library says."""
        return text.replace(self._secret() or "\0", "***")

    def _lines(self, response: Any, deadline: float) -> Iterator[str]:
        """Yield the lines of an answer, which may neither be endless, packed or not, nor take for ever."""
        encoding = response.headers.get("content-encoding", "").strip().lower()
        if encoding not in _ENCODINGS:
            raise ProposerError(f"{self.name} answers in the encoding {encoding[:50]!r}, which it was not asked for")
        unpack = zlib.decompressobj(32 + zlib.MAX_WBITS) if encoding not in ("", "identity") else None
        size, rest = 0, b""
        for chunk in response.iter_raw():
            chunk = unpack.decompress(chunk, _ANSWER_LIMIT + 1) if unpack else chunk
            size += len(chunk)
            if size > _ANSWER_LIMIT:
                raise ProposerError(f"{self.name} does not stop answering")
            if time.monotonic() > deadline:
                raise _Passing("it takes longer than it may")
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line.decode(errors="replace").rstrip("\r") for line in lines)
        yield rest.decode(errors="replace")

    def _check(self, response: Any) -> None:
        """Tell errors that pass from those that stay."""
        status = response.status_code
        if status == 200:
            return
        said = self._masked("\n".join(self._lines(response, time.monotonic() + self._idle)))[:300]
        if status in _PASSING:
            raise _Passing(f"status {status}: {said}", _seconds(response.headers.get("retry-after", "")))
        hint = f"; the key is read from {self._style.key}" if status in (401, 403) else ""
        raise ProposerError(f"{self.name} at {self.destination} refuses with status {status}: {said}{hint}")


class _Cut:
    """Ends the connection of a request at its deadline, also while it waits for headers that come byte by byte.

    It is called with each step of the request, as the library's ``trace``, of which some open a connection.
    """

    def __init__(self, deadline: float):
        self._timer = threading.Timer(max(deadline - time.monotonic(), 0.0), self._end)
        self._timer.daemon = True
        self._socket: socket.socket | None = None
        self._over = False

    def __enter__(self) -> _Cut:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def __call__(self, event: str, info: dict[str, Any]) -> None:
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._socket = info["return_value"].get_extra_info("socket")
            if self._over:
                self._end()

    def _end(self) -> None:
        self._over = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                self._socket.shutdown(socket.SHUT_RDWR)


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the data of server-sent events; or one object, which is the answer of a server that does not stream."""
    plain: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data = line[5:].strip()
            if data == "[DONE]":
                return
            event = json.loads(data)
            if isinstance(event, dict):
                yield event
        elif plain or line.startswith("{"):
            plain.append(line)
    if plain:
        event = json.loads("\n".join(plain))
        if isinstance(event, dict):
            yield event


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return 0.0  # a date, or nothing
    return seconds if 0.0 <= seconds < math.inf else 0.0
