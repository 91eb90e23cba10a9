"""Its settings are fields of records, a constant of the file and one of a class; torch's are given back."""

from __future__ import annotations

import abc
import contextlib
import enum
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from originals.layer import Model

if TYPE_CHECKING:
    from collections.abc import Iterator

FUSED = True
log = logging.getLogger(__name__)


class Way(enum.Enum):
    WHOLE = "whole"
    ROWS = "rows"


class Step(abc.ABC):
    """What is done to a result."""

    @abc.abstractmethod
    def done(self, y):
        """Do it."""


class Relu(Step):
    def done(self, y):
        return torch.relu(y)


@dataclass(frozen=True)
class Parts:
    count: int = 1
    norm: bool = False


@contextlib.contextmanager
def precision(name: str) -> Iterator[None]:
    before, allowed = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cuda.matmul.allow_tf32 = allowed


class Form(NamedTuple):
    relu: bool = True
    scale: float = 1.0


FORM = Form(scale=1.0)


class ModelNew(Model):
    clamped = False

    def __init__(self, width, parts=Parts(), way: Way = Way.WHOLE):
        super().__init__(width)
        self.parts = parts
        self.last = Relu()
        self.way = way
        self.norm = torch.nn.LayerNorm(width) if parts.norm else None

    @property
    def width(self):
        return self.linear.in_features

    def forward(self, x):
        if log.isEnabledFor(logging.DEBUG):
            log.debug("inputs of shape %s, largest %.3g", tuple(x.shape), x.abs().max().item())
        if not FUSED or self.parts.count > 1 or self.way is Way.ROWS:
            return torch.relu(x @ self.linear.weight.mT + self.linear.bias)
        with precision("highest"):
            y = self.linear(x)
        if self.norm is not None:
            y = self.norm(y)
        if self.clamped:
            y = y.clamp(max=1e30)
        if FORM.scale != 1.0:
            y = y * FORM.scale
        return self.last.done(y) if FORM.relu else y
