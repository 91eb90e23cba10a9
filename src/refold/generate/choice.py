"""The choice of a token, in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from refold.generate.sampling import Sampling


@dataclass(frozen=True)
class ChoiceForm:
    """What of a choice changes its program, and not only its numbers."""

    greedy: bool
    top_k: int
    nucleus: bool
    least: bool
    penalty: bool


def kind_of(s: Sampling, vocab_size: int) -> ChoiceForm:
    """Return the program that makes a choice with these settings."""
    greedy = s.temperature == 0
    if greedy:
        return ChoiceForm(True, 0, False, False, s.repetition_penalty != 1)
    return ChoiceForm(False, min(s.top_k, vocab_size), s.top_p < 1, s.min_p > 0, s.repetition_penalty != 1)


def settings_of(s: Sampling, device: torch.device) -> Tensor:
    """Return temperature, top_p, log of min_p, and penalty, ``(1, 4)``."""
    least = float(np.log(s.min_p)) if s.min_p else -np.inf
    return torch.tensor([[s.temperature or 1.0, s.top_p, least, s.repetition_penalty]], device=device)


def choose(logits: Tensor, seen: Tensor, drawn: Tensor, settings: Tensor, kind: ChoiceForm) -> Tensor:
    """Choose a token of each row of ``logits (b, vocab)`` by the numbers ``drawn (b,)`` in [0, 1).

    ``settings`` are those of each row, ``(b, 4)``, or of all, ``(1, 4)``.
    """
    temperature, top_p, least, penalty = settings[..., None].unbind(1)
    if kind.penalty:
        logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    if kind.greedy:
        return logits.argmax(-1)
    values, tokens = logits / temperature, None
    if kind.top_k or kind.nucleus:
        values, tokens = values.topk(kind.top_k or values.shape[-1])
    if kind.nucleus:
        share = values.softmax(-1)
        values = values.masked_fill(share.cumsum(-1) - share >= top_p, -torch.inf)
    if kind.least:
        values = values.masked_fill(values < values.amax(-1, keepdim=True) + least, -torch.inf)
    below = values.softmax(-1).cumsum(-1, dtype=torch.float64)
    place = torch.searchsorted(below, drawn[:, None].double() * below[:, -1:], right=True)
    place = place.clamp(max=values.shape[-1] - 1)
    return (place if tokens is None else tokens.gather(1, place))[:, 0]
