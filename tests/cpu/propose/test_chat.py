"""Models over HTTP: a real server on loopback that speaks both protocols and fails as servers do."""

import contextlib
import gzip
import json
import socket
import struct
import threading
import time
from dataclasses import replace

import pytest

from refold.errors import ArgumentError, ProposerError
from refold.propose import Request, proposer
from refold.propose.chat import _ANSWER_LIMIT, Chat
from refold.propose.prompt import VERSION, answers, question, system
from refold.propose.protocol import Attempt
from support.endpoint import EVENTS

pytest.importorskip("httpx")

CODE = "import torch\n\n\nclass ModelNew(torch.nn.Module):\n    pass"
TEXT = f"Fewer passes.\n\n```python\n{CODE}\n```\n"
REQUEST = Request("class Model: ...", "float32", False, ({"shape": [2, 3], "dtype": "float32"},), {"threads": 1})
KEY = "sk-very-secret"


def _chat(style, server, **options):
    return Chat(style, "some-model", base_url=server.url, **({"tries": 3, "idle": 5.0} | options))


def test_an_answer_is_streamed_and_counted(style, server):
    server.script = [EVENTS[style](TEXT)]
    chat = _chat(style, server, prices=(1.0, 10.0))
    (proposal,) = chat.propose(REQUEST)
    assert proposal.text == CODE
    assert proposal.note == "Fewer passes."
    assert chat.spent() == {"tokens": 120.0, "money": pytest.approx((100 * 1 + 20 * 10) / 1e6)}
    path, headers, body = server.seen[0]
    assert path == {"openai": "/chat/completions", "anthropic": "/v1/messages"}[style]
    assert KEY in (headers.get("Authorization", "") + headers.get("x-api-key", ""))
    assert body["stream"] is True
    assert body["model"] == "some-model"
    assert KEY not in json.dumps(body)
    assert REQUEST.source in json.dumps(body)


@pytest.mark.parametrize(
    "passing",
    [
        (429, {"Retry-After": "0.01"}, "slow down"),
        (503, {}, "overloaded"),
        (529, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, "overloaded"),
        ["{not json"],
        lambda handler: None,
    ],
    ids=["rate limit", "unavailable", "overloaded", "bad json", "nothing"],
)
def test_errors_that_pass_are_waited_out(passing, style, server, monkeypatch):
    waits = []
    monkeypatch.setattr("refold.propose.chat._sleep", waits.append)
    server.script = [passing, EVENTS[style](TEXT, whole=False), EVENTS[style](TEXT)]
    assert _chat(style, server).propose(REQUEST)[0].text == CODE
    assert len(server.seen) == 3
    assert len(waits) == 2
    if isinstance(passing, tuple) and passing[1].get("Retry-After") == "0.01":
        assert waits[0] == 0.01


def test_an_error_in_the_stream_is_asked_again(server, monkeypatch):
    monkeypatch.setattr("refold.propose.chat._sleep", lambda _: None)
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    server.script = [[*EVENTS["anthropic"](TEXT, whole=False), error], EVENTS["anthropic"](TEXT)]
    assert _chat("anthropic", server).propose(REQUEST)[0].text == CODE


@pytest.mark.parametrize(("status", "tries"), [(400, 1), (401, 1), (404, 1), (500, 3)])
def test_an_error_is_one_sentence_without_the_key(status, tries, style, server, monkeypatch):
    monkeypatch.setattr("refold.propose.chat._sleep", lambda _: None)
    server.script = [(status, {}, f"you sent the key {KEY}")] * 3
    with pytest.raises(ProposerError, match=f"status {status}") as caught:
        _chat(style, server).propose(REQUEST)
    assert KEY not in str(caught.value)
    assert KEY not in repr(caught.value.__cause__)
    assert len(server.seen) == tries


def test_a_slow_model_is_not_a_dead_one_and_a_dead_one_is_given_up(style, server):
    given_up = threading.Event()

    def slow(handler):
        for _ in range(6):
            time.sleep(0.2)
            handler.wfile.write(b": still there\n\n")
            handler.wfile.flush()
        for event in EVENTS[style](TEXT):
            handler.say(event)

    def dead(handler):
        given_up.wait(60)

    server.script = [slow, dead]
    assert _chat(style, server, idle=1.0).propose(REQUEST)[0].text == CODE
    with pytest.raises(ProposerError, match="no whole answer after 1 tries: ReadTimeout"):
        _chat(style, server, idle=0.3, tries=1).propose(REQUEST)
    given_up.set()
    assert len(server.seen) == 2


def test_an_endless_answer_is_cut(style, server):
    endless = (EVENTS[style]("x" * (1 << 20), whole=False) for _ in range(9))
    server.script = [(event for events in endless for event in events)]
    with pytest.raises(ProposerError, match="does not stop"):
        _chat(style, server).propose(REQUEST)


def test_several_are_asked_at_the_same_time_and_one_failure_does_not_lose_the_others(server):
    server.script = [EVENTS["openai"](TEXT), (400, {}, "no"), EVENTS["openai"](TEXT)]
    many = Request(**{**REQUEST.__dict__, "wanted": 3})
    assert [p.text for p in _chat("openai", server).propose(many)] == [CODE, CODE]


def test_nobody_there(style):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and listens to nobody
        chat = Chat(style, "m", base_url=f"http://127.0.0.1:{taken.getsockname()[1]}", tries=1)
        with pytest.raises(ProposerError, match="ConnectError"):
            chat.propose(REQUEST)


def test_an_answer_without_source_is_no_proposal_but_is_told(style, server):
    server.script = [EVENTS[style]("I would rather not.")]
    (proposal,) = _chat(style, server).propose(REQUEST)
    assert (proposal.text, proposal.note) == ("", "I would rather not.")


@pytest.mark.parametrize("url", ["ftp://x", "nonsense", "http://user:password@host"])
def test_a_bad_address_is_named(url):
    with pytest.raises(ArgumentError, match="base_url must"):
        Chat("openai", "m", base_url=url)


@pytest.mark.parametrize("spec", ["", "rules", "file", "file:", "gpt:x"])
def test_a_proposer_that_is_none(spec):
    with pytest.raises(ArgumentError, match="--propose must be"):
        proposer(spec)


def test_the_question_holds_what_came_of_earlier_answers():
    attempts = (
        Attempt("class A: ...", "accepted", "", "", 2.0, 1.5),
        Attempt("class B: ...", "refused", "N1", "wrong"),
    )
    asked = question(Request(**{**REQUEST.__dict__, "attempts": attempts}))
    assert "accepted, 2.00x as fast (at least 1.50x)" in asked
    assert "refused by check N1: wrong" in asked
    assert "(2, 3) float32" in asked
    assert "$" not in asked + system()
    assert VERSION.endswith("-1")


def test_only_blocks_with_a_replacement_are_proposals():
    text = f"```python\nimport torch\n```\nthen\n```\n{CODE}\n```\nor\n```py\n{CODE}  # two\n```"
    assert [p.text for p in answers(text)] == [CODE, f"{CODE}  # two"]


def _raw(*chunks):
    """Return a handler that answers with bytes as they are."""

    def say(handler):
        for chunk in chunks:
            handler.wfile.write(chunk)
            handler.wfile.flush()

    return say


def _event(data):
    return f"data: {json.dumps(data)}\n\n".encode()


DONE = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
ODD = {
    "content in parts": _event({"choices": [{"delta": {"content": [{"type": "text", "text": TEXT}, {"type": "x"}]}}]})
    + _event(DONE),
    "tool calls and empty choices": _event({"choices": []})
    + _event({"choices": None, "usage": {"prompt_tokens": None}})
    + _event({"choices": [{"delta": {"content": None, "tool_calls": [{"id": "1"}]}}]})
    + _event({"choices": [{"delta": {"content": TEXT}, "finish_reason": "tool_calls"}]}),
    "no stream": json.dumps({"choices": [{"message": {"content": TEXT}, "finish_reason": "stop"}]}, indent=1).encode(),
    "carriage returns, comments, no last newline": b": waiting\r\n\r\n"
    + _event({"choices": [{"delta": {"content": TEXT}}]}).replace(b"\n", b"\r\n")
    + _event(DONE).rstrip(),
}


@pytest.mark.parametrize("name", ODD)
def test_answers_in_other_forms_are_read(name, server):
    server.script = [_raw(ODD[name])]
    assert Chat("openai", "m", base_url=server.url, tries=1).propose(REQUEST)[0].text == CODE


BROKEN = {
    "bytes that are no text": b"data: \xff\xfe{\n\n",
    "an object too deep": b"data: " + b"[" * 100_000 + b"\n\n",
    "choices that are an object": _event({"choices": {"a": 1}}),
    "no event at all": b": nothing\n\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_answers_that_cannot_be_read_are_asked_again(name, server, monkeypatch):
    monkeypatch.setattr("refold.propose.chat._sleep", lambda _: None)
    server.script = [_raw(BROKEN[name]), EVENTS["openai"](TEXT)]
    assert Chat("openai", "m", base_url=server.url, tries=2).propose(REQUEST)[0].text == CODE


def test_a_line_without_an_end_and_comments_for_ever_are_cut(server):
    server.script = [_raw(*[b"x" * (1 << 20)] * 9)]
    with pytest.raises(ProposerError, match="does not stop"):
        Chat("openai", "m", base_url=server.url, tries=1).propose(REQUEST)

    def pinging(handler):
        for _ in range(100):
            handler.wfile.write(b": still there\n")
            handler.wfile.flush()
            time.sleep(0.02)

    server.script = [pinging]
    with pytest.raises(ProposerError, match="longer than it may"):
        Chat("openai", "m", base_url=server.url, tries=1, seconds=0.1).propose(REQUEST)


def test_a_compressed_answer_is_read_and_a_redirection_is_not_followed(server, style):
    body = gzip.compress(b"".join(map(_event, filter(lambda e: isinstance(e, dict), EVENTS[style](TEXT)))))
    server.script = [(200, {"Content-Encoding": "gzip"}, body), (307, {"Location": f"{server.url}/elsewhere"}, "")]
    assert _chat(style, server, tries=1).propose(REQUEST)[0].text == CODE
    with pytest.raises(ProposerError, match="status 307"):
        _chat(style, server, tries=1).propose(REQUEST)
    assert len(server.seen) == 2


def test_a_key_that_is_echoed_or_malformed_is_in_no_answer_and_no_error(server, style, monkeypatch):
    server.script = [EVENTS[style](f"Your key is {KEY}.")]
    (proposal,) = _chat(style, server).propose(REQUEST)
    assert KEY not in proposal.text + proposal.note
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\nX")
    monkeypatch.setenv("ANTHROPIC_API_KEY", f"{KEY}\nX")
    with pytest.raises(ProposerError) as caught:
        _chat(style, server, tries=1).propose(REQUEST)
    assert KEY not in str(caught.value)


def _drip(chunk, seconds=0.02, before=b""):
    """Return a handler that sends a chunk again and again, without an end, until nobody listens."""

    def say(handler):
        with contextlib.suppress(OSError):
            handler.connection.sendall(before)
            for _ in range(1000):
                handler.connection.sendall(chunk)
                time.sleep(seconds)
        handler.close_connection = True

    return say


@pytest.mark.parametrize("name", ["headers", "provisional answers", "words"])
def test_what_never_ends_ends_with_the_time_of_the_run(name, server, style):
    """Each byte comes soon after the one before, so that no wait for one byte is long."""
    server.raw = name != "words"
    server.script = [{
        "headers": _drip(b"a", before=b"HTTP/1.1 200 OK\r\nX-Long: "),
        "provisional answers": _drip(b"HTTP/1.1 103 Early Hints\r\n\r\n"),
        "words": _drip(b"x"),
    }[name]]  # fmt: skip
    start = time.monotonic()
    with pytest.raises(ProposerError, match="after 1 tries: it takes longer than it may"):
        _chat(style, server).propose(replace(REQUEST, seconds=0.3))
    assert time.monotonic() - start < 10


def test_an_answer_that_grows_when_it_is_unpacked_is_cut(server, style):
    """Of packed bytes, a thousandth is sent; of those packed twice, a millionth."""
    once = gzip.compress(bytes(_ANSWER_LIMIT + 1))
    server.script = [(200, {"Content-Encoding": encoding}, body) for encoding, body in (
        ("gzip", once), ("gzip, gzip", gzip.compress(once)), ("br", b"x"))]  # fmt: skip
    for reason in ("does not stop answering", "encoding 'gzip, gzip'", "encoding 'br'"):
        with pytest.raises(ProposerError, match=reason):
            _chat(style, server).propose(REQUEST)


ERROR = {"error": {"type": "billing_error", "message": "your credit is used up"}}


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ([json.dumps(ERROR)], "credit is used up"),
        ((200, {}, json.dumps({"type": "error", **ERROR})), "credit is used up"),
        ((429, {"Retry-After": "nan"}, "slow down"), "status 429"),
        ((200, {}, b"\xff\xfe\x00"), "cut off"),
    ],
    ids=["an error in the stream", "an error as an answer", "a wait that is no number", "no text"],
)
def test_an_error_is_told_as_the_endpoint_says_it(script, reason, server, style, monkeypatch):
    monkeypatch.setattr("refold.propose.chat._sleep", lambda seconds: time.sleep(min(seconds, 0)))
    server.script = [script] * 2
    with pytest.raises(ProposerError, match=reason):
        _chat(style, server, tries=2).propose(REQUEST)


@pytest.mark.parametrize("count", [-1_000_000, float("inf"), float("nan"), "many", [1]])
def test_no_count_of_tokens_gives_a_budget_back(count, server, style, monkeypatch):
    monkeypatch.setattr("refold.propose.chat._sleep", lambda _: None)
    bad = {"type": "message_delta", "choices": [], "usage": {"completion_tokens": count, "output_tokens": count}}
    server.script = [[bad, *EVENTS[style](TEXT)], EVENTS[style](TEXT)]
    chat = _chat(style, server)
    assert chat.propose(REQUEST)[0].text == CODE
    assert chat.spent()["tokens"] == 120


def test_a_connection_that_breaks_in_a_word_is_asked_again(server, style, monkeypatch):
    monkeypatch.setattr("refold.propose.chat._sleep", lambda _: None)

    def broken(handler):
        for event in list(EVENTS[style](TEXT))[:2]:
            handler.say(event)
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.connection.close()  # at once, with what was not sent yet
        handler.close_connection = True

    server.script = [broken, EVENTS[style](TEXT)]
    assert _chat(style, server).propose(REQUEST)[0].text == CODE


def test_half_a_letter_can_be_recorded_and_sent_back(server, style):
    """JSON can hold half of a pair of surrogates, which no encoding of text has."""
    server.script = [EVENTS[style](f"{TEXT[:-4]}# \ud83d\n```\n"), EVENTS[style](TEXT)]
    chat = _chat(style, server)
    (proposal,) = chat.propose(REQUEST)
    assert proposal.text == f"{CODE}\n# ?"
    long = Attempt(proposal.text + "x" * 10**6, "refused", "N1", "wrong")
    assert chat.propose(replace(REQUEST, attempts=(long,)))[0].text == CODE
    assert len(json.dumps(server.seen[1][2])) < 10**5
