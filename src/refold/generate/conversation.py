"""A conversation, in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from refold.generate.generator import arrays_of, write


@dataclass(eq=False, repr=False)
class Conversation:
    """What a batch of rows has read: ``state``, ``logits (b, vocab)`` of each next token, and tokens ``seen``.

    Generation moves a conversation on in place and reuses its memory; :meth:`fork` first to keep the point you are at.
    """

    state: dict[str, Tensor]
    logits: Tensor
    seen: Tensor
    kept: list[Conversation] = field(default_factory=list)
    """Copies at tokens of the last prompt that ``read`` was asked to keep."""

    def fork(self) -> Conversation:
        """Return an independent copy."""
        return Conversation({name: a.clone() for name, a in self.state.items()}, self.logits.clone(), self.seen.clone())

    def save(self, path: str | Path) -> None:
        """Write the conversation to a safetensors file.

        Raises:
            ArgumentError: the file cannot be written.
        """
        from safetensors.torch import save_file

        write({name: a.contiguous() for name, a in arrays_of(self).items()}, save_file, path)
