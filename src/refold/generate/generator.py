"""Generation, for every framework: requests are checked and prompts cut into pieces here; the framework does the rest.

A conversation holds everything about the tokens so far: the model's state (of constant size, except for the key-value
cache of attention layers), the logits of the next token, and which tokens were seen. It can be forked, saved, loaded
and continued, without reading the past again. Design decision 28.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from refold.errors import ArgumentError, CapacityError, CheckpointError
from refold.generate.sampling import Sampling
from refold.models import counts
from refold.models.configs import Config, HybridConfig

PIECE = 8192
"""Longest piece of a prompt that is read at once; longer prompts are read piece by piece."""

NO_TOKEN = -1
"""Stands where a row had already stopped."""


class HasState(Protocol):
    """A framework's conversation."""

    state: dict[str, Any]
    logits: Any
    seen: Any
    kept: list[Any]

    def fork(self) -> Any:
        """Return an independent copy."""


def arrays_of(conversation: HasState) -> dict[str, Any]:
    """Return the arrays of a conversation, by the names that they are saved under."""
    return {**conversation.state, "logits": conversation.logits, "seen": conversation.seen}


C = TypeVar("C", bound=HasState)


def write(arrays: dict[str, Any], save_file: Callable[..., None], path: str | Path) -> None:
    """Write arrays to a file; an error names it."""
    from safetensors import SafetensorError

    try:
        save_file(arrays, path)
    except (SafetensorError, OSError, TypeError) as error:
        raise ArgumentError(
            f"save: {path} cannot be written ({error}). Name a file in a folder that exists."
        ) from error


class BaseGenerator(ABC, Generic[C]):
    """A model ready to generate; ``refold.generate.torch`` and ``refold.generate.jax`` have one each."""

    config: Config
    params: Any
    model: ModuleType
    """The functions of the model, such as ``init_state``."""
    kind: type[C]
    """The class of this framework's conversations."""

    @abstractmethod
    def start(self, batch: int) -> C:
        """Return the conversation of ``batch`` rows that have read nothing."""

    @abstractmethod
    def lengths(self, conversation: C) -> np.ndarray:
        """Return how many tokens each row has read."""

    @abstractmethod
    def _read_piece(self, conversation: C, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Read right-padded ``tokens (b, t)``; rows of length 0 keep their logits."""

    @abstractmethod
    def _decode(
        self, conversation: C, max_new_tokens: int, every: int, sampling: Sampling, stop: np.ndarray
    ) -> Iterator[np.ndarray]:
        """Choose and read tokens; hand them out every so many steps."""

    @abstractmethod
    def _arrays(self, path: str | Path) -> dict[str, Any]:
        """Read the arrays of a safetensors file."""

    @abstractmethod
    def _fresh(self, batch: int) -> dict[str, Any]:
        """Describe what `start` would save, without its memory."""

    @abstractmethod
    def _conversation(self, arrays: dict[str, Any]) -> C:
        """Make a conversation of what one saved."""

    @property
    @abstractmethod
    def _item_sizes(self) -> tuple[int, int]:
        """Bytes of a number in the weights, and in the recurrent state."""

    @abstractmethod
    def _free_bytes(self) -> int:
        """Return the memory that is left for states and prompts."""

    def read(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        conversation: C | None = None,
        *,
        checkpoint_every: int | None = None,
    ) -> C:
        """Read a prompt for each row, of any lengths, at the end of ``conversation`` (moved on in place) or afresh.

        Args:
            prompts: Token ids of each row.
            conversation: Where they go on; None begins afresh.
            checkpoint_every: Keep a copy of the conversation after each so many tokens of these prompts, in its
                ``kept``. A row that is shorter ends in its copies. So a conversation can be cut back, or go on in
                several ways, and the beginning is read once.

        Raises:
            ArgumentError: a prompt is empty where nothing was read before, a token id is out of range, or the rows
                are not those of the conversation.
            CapacityError: the prompt does not fit into memory.
        """
        if conversation is not None:
            self._check_conversation(conversation)
        rows = check_prompts(self.config, prompts, None if conversation is None else self.lengths(conversation))
        lengths = np.array([len(row) for row in rows], np.int32)
        longest = int(lengths.max())
        if checkpoint_every is not None:
            check_count("checkpoint_every", checkpoint_every)
        every = checkpoint_every or max(longest, 1)
        copies = longest // every if checkpoint_every else 0
        self._check_memory(len(rows), longest, conversation, copies=copies)
        if conversation is None:
            conversation = self.start(len(rows))
        conversation.kept = []
        self._make_room(conversation, longest)
        begins = sorted({*range(0, longest, PIECE), *range(0, longest, every)})
        for begin, end in pairwise([*begins, longest]):
            piece = np.clip(lengths - begin, 0, end - begin)
            tokens = np.zeros((len(rows), self._padded(int(piece.max()))), np.int32)
            for row, out, n in zip(rows, tokens, piece, strict=True):
                out[:n] = row[begin : begin + n]
            self._read_piece(conversation, tokens, piece)
            if checkpoint_every and end % every == 0:
                conversation.kept.append(conversation.fork())
        return conversation

    def stream(
        self, conversation: C, max_new_tokens: int, *, sampling: Sampling | None = None,
        stop_tokens: Sequence[int] | None = None, every: int | None = None,
    ) -> Iterator[np.ndarray]:  # fmt: skip
        """Go on with a conversation, handing out the new tokens every ``every`` steps.

        Args:
            conversation: Moved on in place: afterwards it has read all tokens handed out.
            max_new_tokens: Most tokens per row gets.
            sampling: How tokens are chosen; greedy by default.
            stop_tokens: A row ends with the first of these (which is handed out); None takes the checkpoint's.
            every: Steps between hand-outs; None hands everything out at the end.

        Yields:
            Tokens ``(b, <= every)``, int32; ``NO_TOKEN`` where a row has ended.

        Raises:
            ArgumentError: a count, a stop token or the conversation cannot be used.
            CapacityError: the tokens do not fit into memory.
        """
        self._check_conversation(conversation)
        stop = check_request(self.config, max_new_tokens, every, sampling, stop_tokens)
        lengths = self.lengths(conversation)
        if not lengths.all():
            raise ArgumentError("a row of the conversation has read nothing; read a prompt first.")
        self._check_memory(len(lengths), max_new_tokens, conversation, reading=False)
        self._make_room(conversation, max_new_tokens)
        yield from self._decode(
            conversation, max_new_tokens, every or max_new_tokens, sampling or Sampling(), np.array(stop, np.int32)
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, sampling: Sampling | None = None,
        stop_tokens: Sequence[int] | None = None,
    ) -> list[list[int]]:  # fmt: skip
        """Return the new tokens of each prompt, its stop token included.

        Raises:
            ArgumentError, CapacityError: as `read` and `stream`, before anything is read.
        """
        rows = check_prompts(self.config, prompts)
        stop_tokens = check_request(self.config, max_new_tokens, None, sampling, stop_tokens)
        check_positions(self.config, max(map(len, rows)) + max_new_tokens)
        parts = list(self.stream(self.read(rows), max_new_tokens, sampling=sampling, stop_tokens=stop_tokens))
        return [[int(t) for t in row if t != NO_TOKEN] for row in np.concatenate(parts, axis=1)]

    def load(self, path: str | Path) -> C:
        """Read a conversation that was saved with the same model, in whichever framework.

        Raises:
            CheckpointError: the file is damaged, or belongs to another model.
        """
        from safetensors import SafetensorError

        try:
            arrays = self._arrays(path)
        except (SafetensorError, OSError, TypeError) as error:
            raise CheckpointError(f"{path} is not a saved conversation ({error}).") from error
        length = arrays.get("length", np.zeros(()))
        if length.ndim != 1 or not len(length):
            raise CheckpointError(f"{path} is not a saved conversation: it has no rows.")
        if not self._fits(arrays):
            raise CheckpointError(f"{path} holds the conversation of another model, or another state dtype.")
        if (length < 0).any() or ("k" in arrays and (length > arrays["k"].shape[2]).any()):
            raise CheckpointError(f"{path} is damaged: it says that its rows have read {length.tolist()[:8]} tokens.")
        return self._conversation(arrays)

    def _fits(self, arrays: dict[str, Any]) -> bool:
        """Whether arrays have the names, shapes and dtypes of a conversation with this model."""
        room = arrays["k"].shape[2] if "k" in arrays and arrays["k"].ndim > 2 else 0  # tokens in a key-value cache
        expected = {name: (tuple(a.shape), a.dtype) for name, a in self._fresh(len(arrays["length"])).items()}
        expected |= {n: ((*s[:2], room, *s[3:]), dtype) for n, (s, dtype) in expected.items() if n in ("k", "v")}
        return {name: (tuple(a.shape), a.dtype) for name, a in arrays.items()} == expected

    def _check_conversation(self, conversation: C) -> None:
        if not isinstance(conversation, self.kind):
            wanted, got = f"{self.kind.__module__}.{self.kind.__name__}", type(conversation).__name__
            raise ArgumentError(
                f"conversation must be a {wanted}; got {got}. "
                "Pass what `start`, `read` or `load` of this generator returned."
            )
        if not self._fits(arrays_of(conversation)):
            raise ArgumentError(
                "conversation belongs to another model, or another state dtype. Pass what `start`, `read` or `load` of "
                "this generator returned."
            )

    def _capacity(self, conversation: C) -> int:
        """Return how many tokens per row the key-value cache can hold."""
        return conversation.state["k"].shape[2]

    def _padded(self, length: int) -> int:
        """Return the length to which a piece is padded."""
        return length

    def _make_room(self, conversation: C, new: int) -> None:
        """Let the key-value cache of a hybrid model hold ``new`` more tokens."""
        if not isinstance(self.config, HybridConfig):
            return
        need = int(self.lengths(conversation).max()) + new
        if need > self._capacity(conversation):
            conversation.state = self.model.grow_state(conversation.state, bucket(need))

    def _check_memory(
        self, batch: int, new: int, conversation: C | None, reading: bool = True, copies: int = 0
    ) -> None:
        """Refuse what the model has no positions for, or what memory cannot hold, before any work."""
        config, (weight, state) = self.config, self._item_sizes
        read = 0 if conversation is None else int(self.lengths(conversation).max())
        ssm, conv = counts.state_elements(config)
        need = (copies + (conversation is None)) * batch * (ssm * state + conv * weight)
        if isinstance(config, HybridConfig):
            check_positions(config, read + new)
            held = 0 if conversation is None else self._capacity(conversation)
            room = max(held, bucket(read + new))
            stores = copies + (read + new > held)
            need += (
                stores * batch * room * 2 * config.kinds.count("attention") * config.nkvheads * config.headdim * weight
            )
        need += counts.working_bytes(config, batch, min(new, PIECE) if reading else 1, weight)
        free = self._free_bytes()
        if need > free:
            what = f"reading {new} tokens" if reading else f"{new} new tokens"
            raise CapacityError(
                f"{what} in {batch} rows needs about {need / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free. "
                "Take fewer rows at a time, or a shorter text."
            )


def check_prompts(
    config: Config, prompts: Sequence[Sequence[int] | np.ndarray], read: np.ndarray | None = None
) -> list[np.ndarray]:
    """Return a row of token ids for each prompt; ``read`` says how many tokens each row has read before.

    Raises:
        ArgumentError: a prompt is no row of ids, is empty where nothing was read, or the rows are not as many.
    """
    try:
        rows = list(prompts)
    except TypeError as error:
        raise ArgumentError(f"prompts must be a sequence of rows of token ids; it is {prompts!r:.80}.") from error
    if not rows:
        raise ArgumentError("prompts is empty; give at least one row of token ids.")
    if read is not None and len(rows) != len(read):
        raise ArgumentError(f"{len(rows)} prompts for a conversation of {len(read)} rows.")
    return [_ids(config, i, row, read is None or not read[i]) for i, row in enumerate(rows)]


def _ids(config: Config, i: int, prompt: Sequence[int] | np.ndarray, first: bool) -> np.ndarray:
    try:
        row = np.asarray(prompt)
    except ValueError:  # rows of several lengths
        row = np.zeros(())
    if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
        raise ArgumentError(f"prompt {i} must be a flat sequence of integers.")
    if row.size == 0 and first:
        raise ArgumentError(f"prompt {i} is empty; a row needs at least one token before it can continue.")
    outside = row[(row < 0) | (row >= config.vocab_size)] if row.size else row
    if outside.size:
        raise ArgumentError(f"prompt {i} has token id {int(outside[0])}; ids must lie in [0, {config.vocab_size}).")
    return row


def check_request(
    config: Config,
    max_new_tokens: int,
    every: int | None,
    sampling: Sampling | None,
    stop_tokens: Iterable[int] | None,
) -> list[int]:
    """Return the ids at which a row ends, the checkpoint's if ``stop_tokens`` is None.

    An id of the checkpoint outside its vocabulary is left out: no row can end with it.

    Raises:
        ArgumentError: a count is not positive, ``sampling`` is none, or a stop token is no id of the vocabulary.
    """
    check_count("max_new_tokens", max_new_tokens)
    if every is not None:
        check_count("every", every)
    if not isinstance(sampling, Sampling | None):
        raise ArgumentError(f"sampling must be a Sampling; it is {sampling!r:.80}.")
    if stop_tokens is None:
        return sorted(token for token in config.stop_tokens if token < config.vocab_size)
    if not isinstance(stop_tokens, Iterable):
        raise ArgumentError(f"stop_tokens must be a sequence of token ids; it is {stop_tokens!r}.")
    stop = list(stop_tokens)
    for token in stop:
        if not _is_integer(token) or not 0 <= token < config.vocab_size:
            raise ArgumentError(f"stop token {token!r} is no id in [0, {config.vocab_size}).")
    return sorted(set(stop))


def check_positions(config: Config, tokens: int) -> None:
    """Refuse more tokens in a row than the model has positions for.

    Raises:
        ArgumentError: it has fewer.
    """
    if isinstance(config, HybridConfig) and tokens > config.max_positions:
        raise ArgumentError(
            f"{tokens} tokens do not fit: the model has {config.max_positions} positions "
            "(max_position_embeddings). Shorten the prompt or max_new_tokens."
        )


def check_count(name: str, value: int) -> None:
    """Refuse what is no positive integer.

    Raises:
        ArgumentError: it is none.
    """
    if not _is_integer(value) or value < 1:
        raise ArgumentError(f"{name} must be a positive integer; it is {value!r}.")


def check_state_dtype(name: str) -> None:
    """Refuse a dtype that states are not kept in.

    Raises:
        ArgumentError: it is none of those.
    """
    if name not in ("float32", "bfloat16", "float16"):
        raise ArgumentError(f"state_dtype must be float32, bfloat16 or float16; it is {name!r}.")


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def bucket(length: int) -> int:
    """Return the smallest ``2**k`` or ``3 * 2**k``, at least 16, that is at least ``length``."""
    size = 16
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size
