"""Scans written in chunks: the listing of the Mamba-2 paper, other spellings, and code that only looks similar."""

from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

BATCH, HEADS, GROUPS, CHANNELS, STATES = 2, 4, 2, 5, 6


def below(length, diagonal=0):
    return torch.ones(length, length, dtype=torch.bool).tril(diagonal)


def masked_running_sum(a, diagonal=0, strict=-1):
    """Exponentiate s[i, j] = a[j+1] + ... + a[i], a running sum over masked copies."""
    copies = a[..., None].expand(*a.shape, a.shape[-1]).masked_fill(~below(a.shape[-1], strict), 0)
    return torch.exp(copies.cumsum(-2).masked_fill(~below(a.shape[-1], diagonal), -torch.inf))


def difference(a, diagonal=0):
    total = a.cumsum(-1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(~below(a.shape[-1], diagonal), -torch.inf).exp()


def masked_last(a):
    total = a.cumsum(-1)
    return torch.where(below(a.shape[-1]), torch.exp(total.unsqueeze(-1) - total.unsqueeze(-2)), 0.0)


def lower_triangle(a):
    total = a.cumsum(-1)
    return (total[..., None] - total[..., None, :]).exp().tril()


def multiplied(equation, *factors):
    """Do what einsum does by broadcasting, multiplying and summing."""
    terms, out = equation.split("->")
    letters = sorted(set(terms) - {","})
    total = 1.0
    for term, factor in zip(terms.split(","), factors, strict=True):
        order = [term.index(letter) for letter in letters if letter in term]
        shape = [slice(None) if letter in term else None for letter in letters]
        total = total * factor.permute(order)[tuple(shape)]
    kept = [letter for letter in letters if letter in out]
    return total.sum([letters.index(letter) for letter in letters if letter not in out]).permute(
        [kept.index(letter) for letter in out]
    )


@dataclass
class Listing:
    """The listing of the Mamba-2 paper; every field is a way to spell it, or to get it wrong."""

    chunk: int = 4
    between: object = masked_running_sum
    between_chunks: object = None
    einsum: object = torch.einsum
    last: object = field(default=lambda since: since[..., -1:])
    carry: object = field(default=lambda states: states[:, :-1])
    join: object = field(default=lambda initial, states: torch.cat([initial, states], 1))
    pad: tuple = (1, 0)
    wrong: dict = field(default_factory=dict)

    def __call__(self, x, a, B, C, initial=None):
        def chunked(v):
            return v.reshape(v.shape[0], -1, self.chunk, *v.shape[2:])

        parts = {"x": x, "a": a, "B": B, "C": C}
        x, a, B, C = map(chunked, parts.values())
        other = {name: chunked(value(**parts)) for name, value in self.wrong.items()}
        einsum = self.einsum
        a = a.permute(0, 3, 1, 2)
        since = a.cumsum(-1)
        within = einsum("bclhn,bcshn,bhcls,bcshp->bclhp", C, B, self.between(a), x)
        to_end = torch.exp(self.last(other.get("a_end", a.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).cumsum(-1)) - since)
        states = einsum("bcshn,bhcs,bcshp->bchpn", other.get("B", B), to_end, other.get("x", x))
        states = self.join(torch.zeros_like(states[:, :1]) if initial is None else initial[:, None], states)
        jumps = (self.between_chunks or self.between)(
            F.pad(other["a_total"].sum(2).mT if "a_total" in other else since[..., -1], self.pad)
        )
        states = einsum("bhzc,bchpn->bzhpn", jumps, states)
        from_start = torch.exp(other["a_start"].permute(0, 3, 1, 2).cumsum(-1) if "a_start" in other else since)
        across = einsum("bclhn,bchpn,bhcl->bclhp", other.get("C", C), self.carry(states), from_start)
        return (within + across).flatten(1, 2), states[:, -1]


def inputs(tokens=12, groups=HEADS):
    x, a = torch.randn(BATCH, tokens, HEADS, CHANNELS), torch.randn(BATCH, tokens, HEADS)
    B, C = (torch.randn(BATCH, tokens, groups, STATES) for _ in "BC")
    return x, a, B, C


def repeat_groups(B, how="interleave"):
    if how == "interleave":
        return B.repeat_interleave(HEADS // B.shape[2], dim=2)
    if how == "tile":
        return B.repeat(1, 1, HEADS // B.shape[2], 1)
    return B[:, :, :, None].expand(-1, -1, -1, HEADS // B.shape[2], -1).flatten(2, 3)


SPELLINGS = {
    "plain": Listing(),
    "difference": Listing(between=difference),
    "masked_last": Listing(between=masked_last),
    "lower_triangle": Listing(between=lower_triangle),
    "mixed": Listing(between=difference, between_chunks=masked_running_sum),
    "multiplied": Listing(einsum=multiplied),
    "sum": Listing(last=lambda since: since[..., since.shape[-1] - 1, None]),
    "chunk_of_two": Listing(chunk=2),
    "chunk_of_six": Listing(chunk=6),
    "one_chunk": Listing(chunk=12),
    "bounded_slice": Listing(carry=lambda states: states[:, : states.shape[1] - 1]),
}

NEAR_MISSES = {
    "mask_without_diagonal": Listing(between=partial(masked_running_sum, diagonal=-1)),
    "mask_one_too_wide": Listing(between=partial(difference, diagonal=1)),
    "sum_includes_the_first": Listing(between=partial(masked_running_sum, strict=0)),
    "mask_without_diagonal_between_chunks": Listing(between_chunks=partial(difference, diagonal=-1)),
    "decay_to_the_first": Listing(last=lambda since: since[..., :1]),
    "other_decay_to_the_end": Listing(wrong={"a_end": lambda x, a, B, C: a + 1}),
    "other_decay_from_the_start": Listing(wrong={"a_start": lambda x, a, B, C: 2 * a}),
    "other_decay_between_chunks": Listing(wrong={"a_total": lambda x, a, B, C: a.flip(0)}),
    "other_keys": Listing(wrong={"B": lambda x, a, B, C: C}),
    "other_queries": Listing(wrong={"C": lambda x, a, B, C: B}),
    "other_values": Listing(wrong={"x": lambda x, a, B, C: x + 1}),
    "scaled_values": Listing(wrong={"x": lambda x, a, B, C: 2 * x}),
    "states_behind_the_chunk": Listing(carry=lambda states: states[:, 1:]),
    "initial_state_last": Listing(join=lambda initial, states: torch.cat([states, initial], 1)),
    "totals_one_late": Listing(pad=(0, 1)),
}
