"""Serve one model to several clients at once, over HTTP. It shows how a batch takes and lets go of rows.

    pip install starlette uvicorn
    python examples/serve.py path/to/a/checkpoint            # without a path: a tiny model with random weights
    curl -N localhost:8000/generate -d '{"prompt": [1, 2, 3], "max_new_tokens": 8, "temperature": 0.8}'

Each token is one line of JSON, sent as soon as it is there. One task owns the batch: it adds the rows that wait,
decodes one token of all, and hands the tokens out. A client that goes away frees its row. Production needs an engine.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from refold.errors import RefoldError
from refold.generate.sampling import Sampling
from refold.generate.torch import Batch, BatchRow, Generator
from refold.models.checkpoint import random_params
from refold.models.configs import Mamba2Config, Mixer2Config

OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


@dataclass(eq=False)
class Client:
    """What was asked, where the answers go, and whether somebody still listens."""

    prompt: list[int]
    limit: int
    sampling: Sampling
    answers: asyncio.Queue = field(default_factory=asyncio.Queue)
    listens: bool = True

    async def tokens(self) -> AsyncIterator[int]:
        """Yield the tokens as they come; raise what the batch says of the prompt."""
        try:
            while (token := await self.answers.get()) is not None:
                if isinstance(token, Exception):
                    raise token
                yield token
        finally:
            self.listens = False


async def run(batch: Batch, rows: int, waiting: asyncio.Queue) -> None:
    """Decode for as long as the server lives."""
    clients: dict[BatchRow, Client] = {}
    while True:
        while len(clients) < rows and not (clients and waiting.empty()):
            client = await waiting.get()
            try:
                row = await asyncio.to_thread(batch.add, client.prompt, client.limit, sampling=client.sampling)
            except RefoldError as error:
                client.answers.put_nowait(error)
            else:
                clients[row] = client
        for row in [row for row, client in clients.items() if not client.listens]:
            batch.remove(row)
            del clients[row]
        for row, token in (await asyncio.to_thread(batch.step)).items():
            clients[row].answers.put_nowait(token)
            if row.done:
                clients.pop(row).answers.put_nowait(None)


def application(generator: Generator, rows: int = 8) -> Starlette:
    """Return the server's application: one batch of up to ``rows`` rows."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.waiting = asyncio.Queue()
        task = asyncio.create_task(run(generator.batch(rows), rows, app.state.waiting))
        yield
        task.cancel()

    async def generate(request: Request) -> Response:
        try:
            asked = await request.json()
            sampling = Sampling(**{name: asked[name] for name in OPTIONS if name in asked})
            client = Client(asked["prompt"], asked.get("max_new_tokens", 64), sampling)
            await request.app.state.waiting.put(client)
            tokens = client.tokens()
            first = await anext(tokens)
        except (RefoldError, ValueError, KeyError, TypeError, AttributeError) as error:
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 400)

        async def lines() -> AsyncIterator[str]:
            yield json.dumps({"token": first}) + "\n"
            async for token in tokens:
                yield json.dumps({"token": token}) + "\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    return Starlette(routes=[Route("/generate", generate, methods=["POST"])], lifespan=lifespan)


def main() -> None:
    """Serve the checkpoint that the command names."""
    import uvicorn

    if len(sys.argv) > 1:
        generator = Generator.from_checkpoint(sys.argv[1])
    else:
        config = Mamba2Config(64, 2, Mixer2Config(d_model=32, nheads=4, headdim=16, ngroups=1, dstate=8))
        generator = Generator(config, random_params(config))
    uvicorn.run(application(generator))


if __name__ == "__main__":
    main()
