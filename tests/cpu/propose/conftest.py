"""A server that tests ask, the style that it speaks, and one start of torch for all trials."""

import contextlib
import threading

import pytest

from refold.judge import Nursery
from support.endpoint import Server

KEY = "sk-very-secret"


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(params=["openai", "anthropic"])
def style(request, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    return request.param


@pytest.fixture(scope="session")
def nursery():
    with Nursery(threads=1) as nursery:
        yield nursery


@pytest.fixture(autouse=True)
def one_nursery(nursery, monkeypatch):
    monkeypatch.setattr("refold.propose.loop.Nursery", lambda **options: contextlib.nullcontext(nursery))
