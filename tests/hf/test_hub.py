"""A hub name is fetched through huggingface_hub: here from a hub of our own on this machine."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from refold.generate.jax import Generator
from support.checkpoints import prompt, saved

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """Serve one checkpoint as ``owner/name``; yield the address, and the files that were asked for."""
    _, directory = saved("mamba2")
    files = {path.name: path.read_bytes() for path in directory.iterdir()} | {"weights.onnx": b"not needed"}
    asked: list[str] = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            if self.path.startswith("/api/models/owner/name/revision/"):
                siblings = [{"rfilename": name} for name in files]
                content = json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": siblings}).encode()
            elif self.path.startswith(f"/api/models/owner/name/tree/{COMMIT}"):
                tree = [{"type": "file", "path": n, "size": len(b), "oid": COMMIT} for n, b in files.items()]
                content = json.dumps(tree).encode()
            elif self.path.startswith(f"/owner/name/resolve/{COMMIT}/"):
                name = self.path.rsplit("/", 1)[1]
                content = files[name]
                asked.append(name)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def generate(address: str, name: str, home: Path, **more: str) -> subprocess.CompletedProcess:
    """Run the command in a process of its own: the hub's client reads its settings when it is imported."""
    env = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", **more}
    env |= {"no_proxy": "127.0.0.1", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    ids = ",".join(map(str, prompt(6)[0]))
    command = [sys.executable, "-m", "refold.cli", "generate", name, "--token-ids", ids, "--max-new-tokens", "8"]
    return subprocess.run(command, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_a_hub_name_gives_the_same_tokens_as_its_directory(hub, tmp_path: Path) -> None:
    address, asked = hub
    _, directory = saved("mamba2")
    expected = Generator.from_checkpoint(directory).generate(prompt(6), 8)[0]
    online = generate(address, "owner/name", tmp_path)
    assert [int(token) for token in online.stdout.split()] == expected, online.stderr
    assert {"config.json", "model.safetensors"} <= set(asked)
    assert "weights.onnx" not in asked
    again = generate("http://127.0.0.1:9", "owner/name", tmp_path, HF_HUB_OFFLINE="1")
    assert again.stdout == online.stdout, again.stderr


def test_an_unknown_hub_name_is_one_error(hub, tmp_path: Path) -> None:
    address, _ = hub
    done = generate(address, "owner/unknown", tmp_path)
    assert done.returncode == 2
    assert "owner/unknown is no directory here, and the hub did not give it" in done.stderr
    assert done.stderr.count("\n") == 1
