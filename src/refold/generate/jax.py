"""Generation with JAX: prompts of any lengths are read in a few compiled shapes, then a loop on the device decodes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from refold.generate.generator import NO_TOKEN, BaseGenerator, arrays_of, bucket, check_count, check_state_dtype, write
from refold.generate.sampling import Sampling
from refold.memory import host_bytes
from refold.models.checkpoint import load_checkpoint
from refold.models.configs import Config
from refold.models.jax import model_for, stack_layers, take_layers_apart, to_device

__all__ = ["NO_TOKEN", "Conversation", "Generator"]


@dataclass(repr=False)
class Conversation:
    """What a batch of rows has read: ``state``, ``logits (b, vocab)`` of each next token, and tokens ``seen``.

    Generation moves a conversation on in place and reuses its memory; :meth:`fork` first to keep the point you are at.
    """

    state: dict[str, jax.Array]
    logits: jax.Array
    seen: jax.Array
    kept: list["Conversation"] = field(default_factory=list)
    """Copies at tokens of the last prompt that ``read`` was asked to keep."""

    def fork(self) -> "Conversation":
        """Return an independent copy."""
        return Conversation(*jax.tree.map(jnp.copy, (self.state, self.logits, self.seen)))

    def save(self, path: str | Path) -> None:
        """Write the conversation to a safetensors file.

        Raises:
            ArgumentError: the file cannot be written.
        """
        from safetensors.numpy import save_file

        write({name: np.asarray(a) for name, a in arrays_of(self).items()}, save_file, path)


class Generator(BaseGenerator[Conversation]):
    """A model ready to generate.

    Args:
        config: The model's configuration.
        params: Its parameters; JAX arrays (sharded or not) stay where they are, NumPy arrays go to the default device.
        state_dtype: Dtype of the recurrent state; the arithmetic on it is float32 in any case.
        layers_apart: Decode from a second copy of the layers, as separate arrays, which XLA can read in place. False
            decodes from the stacks: half the memory, and compile time does not grow with depth, but a step takes
            longer (2.7B on an H200: by a tenth at 1 row, 2.5 times at 16).

    Raises:
        ArgumentError: ``state_dtype`` is not float32, bfloat16 or float16.
    """

    kind = Conversation

    def __init__(self, config: Config, params: Any, *, state_dtype: str = "float32", layers_apart: bool = True) -> None:
        check_state_dtype(state_dtype)
        self.config, self.params, self.state_dtype = config, to_device(params), state_dtype
        self._decoding = take_layers_apart(self.params) if layers_apart else self.params
        self.model = model_for(config)
        self._read = jax.jit(partial(_read, config), donate_argnums=(2, 3, 4))
        self._steps = jax.jit(
            partial(_decode, config),
            static_argnames=("room", "greedy", "top_k", "nucleus", "least", "penalised"),
            donate_argnums=(1, 2, 3),
        )

    @classmethod
    def from_checkpoint(
        cls, model: str | Path, *, dtype: str | None = None, state_dtype: str = "float32", layers_apart: bool = True
    ) -> "Generator":
        """Load a checkpoint directory or hub name; see :func:`refold.models.checkpoint.load_checkpoint`."""
        config, params = load_checkpoint(model, dtype)
        return cls(config, params, state_dtype=state_dtype, layers_apart=layers_apart)

    def start(self, batch: int) -> Conversation:
        """Return the conversation of ``batch`` rows that have read nothing."""
        check_count("batch", batch)
        state = self.model.init_state(self.config, batch, self.params["embedding"].dtype, self.state_dtype)
        shape = (batch, self.config.vocab_size)
        return Conversation(state, jnp.zeros(shape, jnp.float32), jnp.zeros(shape, bool))

    def lengths(self, conversation: Conversation) -> np.ndarray:
        """Return how many tokens each row has read."""
        return np.asarray(conversation.state["length"])

    def _fresh(self, batch: int) -> dict[str, Any]:
        def arrays() -> dict[str, jax.Array]:
            start = self.start(batch)
            return {**start.state, "logits": start.logits, "seen": start.seen}

        return jax.eval_shape(arrays)

    def _conversation(self, arrays: dict[str, Any]) -> Conversation:
        given = {name: jnp.asarray(a) for name, a in arrays.items()}
        return Conversation(logits=given.pop("logits"), seen=given.pop("seen"), state=given)

    def _arrays(self, path: str | Path) -> dict[str, Any]:
        from safetensors.numpy import load_file

        return load_file(path)

    @property
    def _item_sizes(self) -> tuple[int, int]:
        return self.params["embedding"].dtype.itemsize, jnp.dtype(self.state_dtype).itemsize

    def _free_bytes(self) -> int:
        stats = next(iter(self.params["embedding"].devices())).memory_stats()
        return host_bytes() if not stats else stats["bytes_limit"] - stats["bytes_in_use"]

    def _padded(self, length: int) -> int:
        return bucket(length)

    def _read_piece(self, conversation: Conversation, tokens: np.ndarray, lengths: np.ndarray) -> None:
        c = conversation
        c.logits, c.seen, c.state = self._read(
            self.params, jnp.asarray(tokens), c.state, c.logits, c.seen, jnp.asarray(lengths)
        )

    def _decode(
        self, conversation: Conversation, max_new_tokens: int, every: int, sampling: Sampling, stop: np.ndarray
    ) -> Iterator[np.ndarray]:
        c, s = conversation, sampling
        done = jnp.zeros(len(c.logits), bool)
        left = max_new_tokens
        while left:
            steps = min(left, every)
            tokens, count, done, c.logits, c.seen, c.state = self._steps(
                self._decoding,
                c.state,
                c.logits,
                c.seen,
                done,
                steps,
                jnp.asarray(stop),
                jax.random.key(s.seed),
                s.temperature,
                s.top_p,
                s.min_p,
                s.repetition_penalty,
                room=every if every < max_new_tokens else bucket(steps),
                greedy=s.temperature == 0,
                top_k=min(s.top_k, self.config.vocab_size),
                nucleus=s.top_p < 1,
                least=s.min_p > 0,
                penalised=s.repetition_penalty != 1,
            )
            yield np.asarray(tokens[:, : int(count)])
            left -= steps
            if bool(done.all()):
                return


def _read(
    config: Config, params: Any, tokens: jax.Array, state: Any, logits: jax.Array, seen: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, jax.Array, Any]:
    """Read right-padded ``tokens (b, t)``; rows of length 0 keep their logits."""
    new, state = model_for(config).forward(config, params, tokens, state, lengths=lengths)
    valid = jnp.arange(tokens.shape[1]) < lengths[:, None]
    seen = _mark(seen, tokens, valid)
    return jnp.where((lengths > 0)[:, None], new, logits), seen, state


def _mark(seen: jax.Array, tokens: jax.Array, which: jax.Array) -> jax.Array:
    """Note the tokens ``(b, t)`` of each row that ``which`` marks."""
    places = jnp.where(which, tokens, seen.shape[1])
    return seen.at[jnp.arange(len(seen))[:, None], places].set(True, mode="drop")


def _decode(
    config: Config, params: Any, state: Any, logits: jax.Array, seen: jax.Array, done: jax.Array, steps: Any,
    stop: jax.Array, key: jax.Array, temperature: Any, top_p: Any, min_p: Any, penalty: Any, *, room: int, greedy: bool,
    top_k: int, nucleus: bool, least: bool, penalised: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, Any]:  # fmt: skip
    """Choose and read up to ``steps <= room`` tokens, all on the device; ends early when all rows are done."""
    model = model_for(config)
    rows = jnp.arange(len(logits))
    apart = isinstance(params["layers"], tuple)
    if apart:
        state = take_layers_apart(state)

    def going(carry: Any) -> jax.Array:
        i, _, done, *_ = carry
        return (i < steps) & ~done.all()

    def body(carry: Any) -> Any:
        i, tokens, done, logits, seen, state = carry
        weighed = logits
        if penalised:
            weighed = jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)
        if greedy:
            token = jnp.argmax(weighed, axis=-1).astype(jnp.int32)
        else:
            # One key a row and position: how rows are batched or streamed does not change what they draw.
            keys = jax.vmap(lambda row, n: jax.random.fold_in(jax.random.fold_in(key, row), n))(rows, state["length"])
            token = choose(weighed / temperature, keys, top_k, top_p if nucleus else None, min_p if least else None)
        tokens = tokens.at[:, i].set(jnp.where(done, NO_TOKEN, token))
        seen = _mark(seen, token[:, None], ~done[:, None])
        logits_, state = model.step(config, params, token, state, active=~done)
        logits = jnp.where(done[:, None], logits, logits_)
        done = done | (token[:, None] == stop).any(axis=1)
        return i + 1, tokens, done, logits, seen, state

    tokens = jnp.full((len(logits), room), NO_TOKEN, jnp.int32)
    carry = (0, tokens, done, logits, seen, state)
    count, tokens, done, logits, seen, state = jax.lax.while_loop(going, body, carry)
    return tokens, jnp.asarray(count), done, logits, seen, stack_layers(state) if apart else state


def choose(logits: jax.Array, keys: jax.Array, top_k: int, top_p: Any, min_p: Any = None) -> jax.Array:
    """Draw a token of each row of ``logits (b, vocab)`` among the ``top_k`` (0: all) likeliest in the nucleus."""
    values, tokens = logits, None
    if top_k or top_p is not None:
        values, tokens = jax.lax.top_k(logits, top_k or logits.shape[-1])
    if top_p is not None:
        share = jax.nn.softmax(values, axis=-1)
        values = jnp.where(jnp.cumsum(share, axis=-1) - share < top_p, values, -jnp.inf)
    if min_p is not None:
        values = jnp.where(values >= values.max(axis=-1, keepdims=True) + jnp.log(min_p), values, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys, values)
    return (drawn if tokens is None else jnp.take_along_axis(tokens, drawn[:, None], axis=1)[:, 0]).astype(jnp.int32)
