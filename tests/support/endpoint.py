"""A real server on loopback that speaks both protocols and fails as servers do."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def openai_events(text, whole=True):
    for part in (text[: len(text) // 2], text[len(text) // 2 :]):
        yield {"choices": [{"delta": {"content": part}, "finish_reason": None}]}
    if whole:
        yield {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        yield {"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 20}}
        yield "[DONE]"


def anthropic_events(text, whole=True):
    yield {"type": "message_start", "message": {"usage": {"input_tokens": 100, "output_tokens": 1}}}
    yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    yield {"type": "ping"}
    for part in (text[: len(text) // 2], text[len(text) // 2 :]):
        yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": part}}
    if whole:
        yield {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 20}}
        yield {"type": "message_stop"}


EVENTS = {"openai": openai_events, "anthropic": anthropic_events}


class Server(ThreadingHTTPServer):
    """Answers with the next of a script: events, a status, or a function of the handler."""

    def __init__(self):
        self.script, self.seen = [], []
        self.raw = False  # whether functions write headers, too
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, dict(self.headers), body))
        answer = self.server.script.pop(0)
        if isinstance(answer, tuple):
            status, headers, text = answer
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text if isinstance(text, bytes) else text.encode())
            return
        if self.server.raw:
            answer(self)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if callable(answer):
            answer(self)
            return
        for event in answer:
            self.say(event)

    def say(self, event):
        data = event if isinstance(event, str) else json.dumps(event)
        try:
            self.wfile.write(f"event: x\ndata: {data}\n\n".encode())
            self.wfile.flush()
        except OSError:
            self.close_connection = True  # whoever asked has heard enough

    def log_message(self, *_):
        pass
