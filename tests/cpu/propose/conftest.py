"""A server for tests, and the protocol that it speaks."""

import threading

import pytest

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
