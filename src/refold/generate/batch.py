"""Rows that come and go while others go on: what a service needs of a generator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from refold.errors import ArgumentError, CapacityError
from refold.generate.choice import ChoiceForm, choose, kind_of, settings_of
from refold.generate.conversation import Conversation
from refold.generate.generator import BaseGenerator, bucket, check_count, check_positions, check_prompts, check_request
from refold.generate.sampling import Sampling, uniforms
from refold.models.torch.layers import kernels
from refold.ops.torch.graphs import recorders


@dataclass(eq=False)
class BatchRow:
    """One row of a batch.

    Attributes:
        limit: The most tokens that it gets.
        sampling: How its tokens are chosen.
        stop: It ends with the first of these, which is its last token.
        keep: Whether ``conversation`` is set when it ends.
        tokens: What it has got so far.
        done: Whether it has left the batch.
        conversation: What it has read, all its tokens included; None while it is in the batch, or if it is not kept.
    """

    limit: int
    sampling: Sampling
    stop: frozenset[int]
    keep: bool
    tokens: list[int] = field(default_factory=list)
    done: bool = False
    conversation: Conversation | None = None


class Batch:
    """Rows that are decoded together, each as if it were alone.

    A row draws the numbers, and stops at the tokens, that it would alone: those of ``generate([prompt], ...)``. The
    model computes 1, 2, 4, ... rows at a time, as few as hold those that are there; on a GPU, each such number has one
    CUDA graph. Another number of rows may round differently. With ``fixed``, the model always computes all ``rows``:
    then the neighbours of a row change nothing in its tokens. One thread at a time may use a batch.

    Args:
        generator: The model.
        rows: The most rows at a time.
        fixed: Always compute all of them.

    Raises:
        ArgumentError: ``rows`` is no positive integer.
        CapacityError: Their states do not fit into memory.
    """

    def __init__(self, generator: BaseGenerator[Any], rows: int, *, fixed: bool = False) -> None:
        check_count("rows", rows)
        generator._check_memory(rows, 1, None, reading=False)
        self.generator, self.fixed = generator, fixed
        self._rows: list[BatchRow | None] = [None] * rows
        self._held = generator.start(rows)
        self._lengths = np.zeros(rows, np.int64)  # those of the state: to ask the device takes a round trip
        self._steps: dict[int, _Step] = {}

    def __len__(self) -> int:
        """Return how many rows are there."""
        return len(self._taken())

    def add(
        self, prompt: Sequence[int] | np.ndarray | Conversation, max_new_tokens: int, *,
        sampling: Sampling | None = None, stop_tokens: Sequence[int] | None = None, keep: bool = False,
    ) -> BatchRow:  # fmt: skip
        """Read a prompt, and let its row decode with the others from the next step on.

        Args:
            prompt: Token ids; or a conversation of one row, which is copied, so that a shared beginning is read once.
            max_new_tokens: The most tokens that the row gets.
            sampling: How they are chosen; greedy by default.
            stop_tokens: The row ends with the first of these; None takes the checkpoint's.
            keep: Keep its conversation when it ends.

        Raises:
            ArgumentError: As of ``read`` and ``stream`` of a generator; or the conversation has several rows.
            CapacityError: All rows are taken, or memory is.
        """
        g = self.generator
        stop = check_request(g.config, max_new_tokens, None, sampling, stop_tokens)
        if None not in self._rows:
            raise CapacityError(f"all {len(self._rows)} rows are taken. Wait until one is done, or remove one.")
        if isinstance(prompt, Conversation):
            g._check_conversation(prompt)
            lengths = g.lengths(prompt)
            if len(lengths) != 1 or not lengths[0]:
                raise ArgumentError(f"prompt must be a conversation of one row that has read something; got {lengths}.")
            length = int(lengths[0])
        else:
            length = len(check_prompts(g.config, [prompt])[0])
        check_positions(g.config, length + max_new_tokens)
        self._make_room(length + max_new_tokens)
        read = prompt if isinstance(prompt, Conversation) else g.read([prompt])
        row = BatchRow(max_new_tokens, sampling or Sampling(), frozenset(stop), keep)
        place = self._rows.index(None)
        self._rows[place] = row
        self._put(place, read)
        return row

    def remove(self, row: BatchRow) -> Conversation:
        """Let a row go before its end, and return its conversation.

        Raises:
            ArgumentError: The row is not in this batch, or not any more.
        """
        if not isinstance(row, BatchRow) or row not in self._rows:
            raise ArgumentError("row is not in this batch: it has ended, was removed, or belongs to another batch.")
        conversation = self._conversation(self._rows.index(row))
        self._leave(row)
        return conversation

    @torch.no_grad()
    def step(self) -> dict[BatchRow, int]:
        """Choose and read one token of every row; rows that end leave the batch.

        Returns:
            The new token of each row.
        """
        g, device, taken = self.generator, self._held.logits.device, self._taken()
        if not taken:
            return {}
        count = self._computed(taken[-1] + 1)
        if (step := self._steps.get(count)) is None:
            step = self._steps[count] = _Step(g, self._held, count)
        chosen = self._choose(taken)
        places = torch.tensor(taken, device=device)
        step.token.index_copy_(0, places, torch.tensor(list(chosen.values()), device=device))
        self._held.seen[places, step.token[places]] = True
        step.active.zero_().index_fill_(0, places, True)
        step.run()
        self._lengths[taken] += 1
        made, ended = dict[BatchRow, int](), []
        for place, token in chosen.items():
            row = self._rows[place]
            assert row is not None
            row.tokens.append(token)
            made[row] = token
            if token in row.stop or len(row.tokens) == row.limit:
                row.conversation = self._conversation(place) if row.keep else None
                ended.append(row)
        for row in ended:
            self._leave(row)
        return made

    def _choose(self, places: list[int]) -> dict[int, int]:
        """Choose a token of each row. Rows whose choice is the same program are one call of it, as a row alone is."""
        g, held, alike = self.generator, self._held, defaultdict[ChoiceForm, list[int]](list)
        device = held.logits.device
        for place in places:
            row = self._rows[place]
            assert row is not None
            alike[kind_of(row.sampling, g.config.vocab_size)].append(place)
        chosen = dict[int, int]()
        for kind, same in alike.items():
            samplings = [row.sampling for place in same if (row := self._rows[place]) is not None]
            drawn = [
                uniforms(s.seed, self._lengths[place : place + 1], 1)[0, 0]
                for s, place in zip(samplings, same, strict=True)
            ]
            at = torch.tensor(same, device=device)
            tokens = choose(
                held.logits[at],
                held.seen[at],
                torch.tensor(drawn, dtype=torch.float64, device=device),
                torch.cat([settings_of(s, device) for s in samplings]),
                kind,
            )
            chosen |= zip(same, tokens.tolist(), strict=True)
        return dict(sorted(chosen.items()))

    def _computed(self, rows: int) -> int:
        """Return how many rows the model computes where so many are needed."""
        return len(self._rows) if self.fixed else min(1 << (rows - 1).bit_length(), len(self._rows))

    def _taken(self) -> list[int]:
        return [place for place, row in enumerate(self._rows) if row is not None]

    def _leave(self, row: BatchRow) -> None:
        """Free the place of a row; the last one moves there if fewer rows can be computed then."""
        place = self._rows.index(row)
        row.done, self._rows[place] = True, None
        self._forget(place)
        taken = self._taken()
        if not taken or self._computed(taken[-1] + 1) == self._computed(len(taken)):
            return
        self._put(place, self._conversation(taken[-1]))
        self._rows[place], self._rows[taken[-1]] = self._rows[taken[-1]], None
        self._forget(taken[-1])

    def _forget(self, place: int) -> None:
        self._held.state["length"][place] = self._lengths[place] = 0

    def _make_room(self, tokens: int) -> None:
        """Let attention layers keep so many tokens of each row."""
        held, g = self._held, self.generator
        if "k" in held.state and tokens > g._capacity(held):
            g._check_memory(len(self._rows), tokens - int(self._lengths.max()), held, reading=False)
            held.state = g.model.grow_state(held.state, bucket(tokens))
            self._steps.clear()

    def _put(self, place: int, row: Conversation) -> None:
        """Copy a conversation of one row to a place."""
        length = self._lengths[place] = int(row.state["length"][0])
        for name, a in self._held.state.items():
            if name == "length":
                a[place] = length
            elif name in ("k", "v"):
                a[:, place, :length] = row.state[name][:, 0, :length]
            else:
                a[:, place] = row.state[name][:, 0]
        self._held.logits[place], self._held.seen[place] = row.logits[0], row.seen[0]

    def _conversation(self, place: int) -> Conversation:
        """Return a copy of one row."""
        g, held, part = self.generator, self._held, slice(place, place + 1)
        room = bucket(int(self._lengths[place]))
        state = {name: a[part] if name == "length" else a[:, part] for name, a in held.state.items()}
        state |= {name: state[name][:, :, :room] for name in ("k", "v") if name in state}
        return g.kind(state, held.logits[part], held.seen[part]).fork()


class _Step:
    """The model's step of the first rows of a batch, in the batch's own memory."""

    def __init__(self, generator: BaseGenerator[Any], held: Conversation, count: int) -> None:
        self.generator = generator
        self.state = {name: a[:count] if name == "length" else a[:, :count] for name, a in held.state.items()}
        self.logits = held.logits[:count]
        self.token = torch.zeros(count, dtype=torch.int64, device=self.logits.device)
        self.active = torch.zeros(count, dtype=torch.bool, device=self.logits.device)
        self.run = self._read
        kind = self.logits.device.type
        if kind in recorders and (kind != "cuda" or kernels(self.logits) is not None):
            for _ in range(2):  # compiles, and fills caches; no row is active
                self._read()
            _, self.run = recorders[kind](self._read, None)

    def _read(self) -> None:
        g = self.generator
        logits = g.model.step_(g.config, g.params, self.token, self.state, active=self.active)
        torch.where(self.active[:, None], logits, self.logits, out=self.logits)
