"""Generation with PyTorch: prompts are read by the scans; on a GPU, a token is one replay of a CUDA graph.

A graph holds the choice of a token and the step of the model, for one batch size. Its state is lent to the conversation
that it decodes, so nothing is copied while one conversation goes on. A second conversation of the same size takes the
state over, and the first gets a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from refold.errors import ArgumentError
from refold.generate.batch import Batch, BatchRow
from refold.generate.choice import ChoiceForm, choose, kind_of, settings_of
from refold.generate.conversation import Conversation
from refold.generate.generator import NO_TOKEN, BaseGenerator, check_count, check_state_dtype
from refold.generate.sampling import Sampling, uniforms
from refold.models.configs import Config
from refold.models.torch import load_checkpoint, model_for, take_layers_apart, to_device
from refold.models.torch.layers import kernels, wide
from refold.ops.torch.devices import usable
from refold.ops.torch.graphs import recorders
from refold.verify.memory import available_bytes

__all__ = ["NO_TOKEN", "Batch", "BatchRow", "Conversation", "Generator"]

_ROOM = 256
"""Steps between two looks at what a graph has made, at most."""

_LOOK = 32
"""The same where a row may end."""

_GRAPHS = 4
"""Graphs that are kept, each with a state of its own."""


class Generator(BaseGenerator[Conversation]):
    """A model ready to generate.

    Args:
        config: The model's configuration.
        params: Its parameters, with stacked or separate layers; NumPy arrays or tensors.
        device: Where it runs.
        state_dtype: Dtype of the recurrent state; the arithmetic on it is float32 in any case.

    Raises:
        DeviceError: the device is not there.
        ArgumentError: ``state_dtype`` is not float32, bfloat16 or float16.
    """

    kind = Conversation

    def __init__(
        self, config: Config, params: Any, *, device: str | torch.device = "cpu", state_dtype: str = "float32"
    ) -> None:
        check_state_dtype(state_dtype)
        self.config, self.device = config, usable(device)
        self.params = take_layers_apart(to_device(params, self.device))
        self.state_dtype = getattr(torch, state_dtype)
        self.model = model_for(config)
        self._graphs: dict[Any, _Graph] = {}

    @classmethod
    def from_checkpoint(
        cls, model: str | Path, *, dtype: str | None = None, device: str | torch.device | None = None,
        state_dtype: str = "float32",
    ) -> Generator:  # fmt: skip
        """Load a checkpoint directory or hub name; see :func:`refold.models.checkpoint.load_checkpoint`.

        ``device`` None is a GPU if there is one.
        """
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        config, params = load_checkpoint(model, dtype, device)
        return cls(config, params, device=device, state_dtype=state_dtype)

    def batch(self, rows: int, *, fixed: bool = False) -> Batch:
        """Return a batch of up to ``rows`` rows that come and go: see `Batch`."""
        return Batch(self, rows, fixed=fixed)

    def start(self, batch: int) -> Conversation:
        """Return the conversation of ``batch`` rows that have read nothing."""
        check_count("batch", batch)
        return self._conversation(self._fresh(batch, self.device))

    def lengths(self, conversation: Conversation) -> np.ndarray:
        """Return how many tokens each row has read."""
        return conversation.state["length"].cpu().numpy()

    def _fresh(self, batch: int, device: str | torch.device = "meta") -> dict[str, Tensor]:
        state = self.model.init_state(self.config, batch, self.params["embedding"].dtype, self.state_dtype, device)
        shape = (batch, self.config.vocab_size)
        logits = torch.zeros(shape, dtype=wide(self.params["embedding"].dtype), device=device)
        return {**state, "logits": logits, "seen": torch.zeros(shape, dtype=torch.bool, device=device)}

    def _conversation(self, arrays: dict[str, Tensor]) -> Conversation:
        state = {name: a.to(self.device) for name, a in arrays.items() if name not in ("logits", "seen")}
        return Conversation(state, arrays["logits"].to(self.device), arrays["seen"].to(self.device))

    def _arrays(self, path: str | Path) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        return load_file(path)

    @property
    def _item_sizes(self) -> tuple[int, int]:
        return self.params["embedding"].itemsize, self.state_dtype.itemsize

    def _free_bytes(self) -> int:
        return available_bytes(self.device)

    @torch.no_grad()
    def _read_piece(self, conversation: Conversation, tokens: np.ndarray, lengths: np.ndarray) -> None:
        _mark(conversation.seen, tokens, np.arange(tokens.shape[1]) < lengths[:, None])
        ids = torch.from_numpy(tokens).to(self.device)
        logits, conversation.state = self.model.forward(
            self.config, self.params, ids, conversation.state, lengths=lengths.tolist()
        )
        read = torch.from_numpy(lengths > 0).to(self.device)
        conversation.logits = torch.where(read[:, None], logits, conversation.logits)

    @torch.no_grad()
    def _decode(
        self, conversation: Conversation, max_new_tokens: int, every: int, sampling: Sampling, stop: np.ndarray
    ) -> Iterator[np.ndarray]:
        loop = self._loop(conversation, sampling)
        done = np.zeros(len(conversation.logits), bool)
        left = max_new_tokens
        while left and not done.all():
            parts, steps = [], min(left, every)
            left -= steps
            while steps and not done.all():
                now = min(steps, _LOOK if len(stop) else _ROOM)
                steps -= now
                tokens = loop(conversation, now, sampling, stop, done)
                done |= np.isin(tokens, stop).any(1)
                made = (tokens != NO_TOKEN).any(0)
                parts.append(tokens[:, made])
                if sampling.repetition_penalty == 1:  # else the loop has marked them
                    _mark(conversation.seen, tokens, tokens != NO_TOKEN)
            yield np.concatenate(parts, axis=1)

    def _loop(self, conversation: Conversation, sampling: Sampling) -> Any:
        """Make the decoder: a graph where there can be one, and ranks need not meet."""
        if kernels(conversation.logits) is None or self.config.mixer.heads is not None:
            return self._plain_loop
        kind = kind_of(sampling, self.config.vocab_size)
        shapes = tuple(tuple(a.shape) for a in conversation.state.values())
        if (key := (kind, shapes)) not in self._graphs:
            while len(self._graphs) >= _GRAPHS:
                self._graphs.pop(next(iter(self._graphs))).give_back()
            self._graphs[key] = _Graph(self, conversation, kind)
        graph = self._graphs[key] = self._graphs.pop(key)  # the last one used
        return graph

    def _plain_loop(
        self, conversation: Conversation, steps: int, sampling: Sampling, stop: np.ndarray, done: np.ndarray
    ) -> np.ndarray:
        """Choose and read ``steps`` tokens, one after the other."""
        c, done, kind = conversation, done.copy(), kind_of(sampling, self.config.vocab_size)
        settings = settings_of(sampling, self.device)
        drawn = torch.from_numpy(uniforms(sampling.seed, self.lengths(c), steps)).to(self.device)
        tokens = np.full((len(done), steps), NO_TOKEN, np.int32)
        for i in range(steps):
            if done.all():
                break
            token = choose(c.logits, c.seen, drawn[:, i], settings, kind)
            tokens[:, i] = np.where(done, NO_TOKEN, token.cpu().numpy())
            active = None if not done.any() else torch.from_numpy(~done).to(self.device)
            logits = self.model.step_(self.config, self.params, token, c.state, active=active)
            c.logits = logits if active is None else torch.where(active[:, None], logits, c.logits)
            if kind.penalty:
                _mark(c.seen, tokens[:, i : i + 1], tokens[:, i : i + 1] != NO_TOKEN)
            done |= np.isin(tokens[:, i], stop)
        return tokens


def _mark(seen: Tensor, tokens: np.ndarray, which: np.ndarray) -> None:
    """Note the tokens of each row that ``which`` marks."""
    rows, columns = np.nonzero(which)
    places = torch.from_numpy(np.stack([rows, tokens[rows, columns]]).astype(np.int64)).to(seen.device)
    seen[places[0], places[1]] = True


class _Graph:
    """The choice and the reading of one token per row, recorded once and replayed."""

    def __init__(self, generator: Generator, conversation: Conversation, kind: ChoiceForm) -> None:
        fused = kernels(conversation.logits)
        assert fused is not None
        self.fused, self.generator, self.kind = fused, weakref.proxy(generator), kind
        self.state = {name: torch.empty_like(a) for name, a in conversation.state.items()}
        self.logits, self.seen = torch.zeros_like(conversation.logits), torch.zeros_like(conversation.seen)
        self.holder: weakref.ref[Conversation] | None = None
        device, batch = self.logits.device, len(self.logits)
        self.token = torch.zeros(batch, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(batch, _ROOM, dtype=torch.int32, device=device)
        self.count = torch.zeros(batch, dtype=torch.int32, device=device)
        self.active = torch.zeros(batch, dtype=torch.bool, device=device)
        self.done = torch.ones(batch, dtype=torch.bool, device=device)
        self.drawn = torch.zeros(batch, _ROOM, dtype=torch.float64, device=device)
        self.settings = torch.ones(1, 4, device=device)
        self.stop = torch.full((16,), NO_TOKEN, dtype=torch.int32, device=device)
        for a in self.state.values():
            a.zero_()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles, and fills caches; no row is active
                self._token()
        torch.cuda.current_stream(device).wait_stream(stream)
        _, self.replay = recorders["cuda"](self._token, None)

    def _token(self) -> None:
        g, kind = self.generator, self.kind
        if not kind.greedy or kind.penalty:
            drawn = self.drawn.gather(1, self.count[:, None].long())[:, 0]
            self.token.copy_(choose(self.logits, self.seen, drawn, self.settings, kind))
        greedy = kind.greedy and not kind.penalty
        self.fused.take(self.logits, self.token, self.tokens, self.count, self.done, self.active, self.stop, greedy)
        if kind.penalty:
            place = self.token[:, None]
            self.seen.scatter_(1, place, self.seen.gather(1, place) | self.active[:, None])
        logits = g.model.step_(g.config, g.params, self.token, self.state, active=self.active)
        torch.where(self.active[:, None], logits, self.logits, out=self.logits)

    def __call__(
        self, conversation: Conversation, steps: int, sampling: Sampling, stop: np.ndarray, done: np.ndarray
    ) -> np.ndarray:
        """Choose and read ``steps`` tokens."""
        self._lend(conversation)
        device = self.logits.device
        if len(stop) > len(self.stop):
            raise ArgumentError(f"{len(stop)} stop tokens are given; on a GPU there may be {len(self.stop)}.")
        self.stop.copy_(torch.from_numpy(np.pad(stop, (0, len(self.stop) - len(stop)), constant_values=NO_TOKEN)))
        self.settings.copy_(settings_of(sampling, device))
        self.done.copy_(torch.from_numpy(done))
        self.count.zero_()
        if not self.kind.greedy:
            drawn = uniforms(sampling.seed, self.generator.lengths(conversation), steps)
            self.drawn[:, :steps] = torch.from_numpy(drawn).to(device)
        for _ in range(steps):
            self.replay()
        return self.tokens[:, :steps].cpu().numpy()

    def _lend(self, conversation: Conversation) -> None:
        """Let a conversation live in this graph's memory; the one that does gets memory of its own."""
        if conversation.state is self.state and conversation.logits is self.logits:
            return
        self.give_back()
        for name, a in self.state.items():
            a.copy_(conversation.state[name])
        self.logits.copy_(conversation.logits)
        self.seen.copy_(conversation.seen)
        conversation.state, conversation.logits, conversation.seen = self.state, self.logits, self.seen
        self.holder = weakref.ref(conversation)

    def give_back(self) -> None:
        """Give the conversation in this graph's memory a copy of its own."""
        held = None if self.holder is None else self.holder()
        if held is None:
            return
        held.state = {name: a.clone() if a is self.state[name] else a for name, a in held.state.items()}
        if held.logits is self.logits:
            held.logits = self.logits.clone()
        if held.seen is self.seen:
            held.seen = self.seen.clone()
        self.holder = None
