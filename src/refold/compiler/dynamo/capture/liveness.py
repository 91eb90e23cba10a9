"""Which local variables the code may still read, at one of its instructions.

Dynamo's own analysis keeps variables alive that a loop's body writes before it reads them. A list that each step makes
anew would then be something that steps hand on.

Source: Aho, Lam, Sethi & Ullman, Compilers, 2nd edition, 9.2.5.
"""

from __future__ import annotations

from torch._dynamo.bytecode_analysis import HASFREE, HASLOCAL, JUMP_OPCODES, TERMINAL_OPCODES
from torch._dynamo.bytecode_transformation import Instruction


def live_at(instructions: list[Instruction], at: Instruction) -> set[str]:
    """Return the variables that may be read before they are written, from an instruction on.

    Args:
        instructions: The code of a function.
        at: One of them.
    """
    position = {id(x): i for i, x in enumerate(instructions)}
    following = [[position[id(x)] for x in _targets(one)] for one in instructions]
    for i, one in enumerate(instructions[:-1]):
        if one.opcode not in TERMINAL_OPCODES:
            following[i].append(i + 1)
    live: list[set[str]] = [set() for _ in instructions]
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(instructions))):
            read, written = _accesses(instructions[i])
            now = read | (set().union(*(live[j] for j in following[i])) - written)
            changed |= now != live[i]
            live[i] = now
    return live[position[id(at)]]


def _targets(one: Instruction) -> list[Instruction]:
    """Return where an instruction may go on, other than at the next. To store a local variable cannot fail."""
    handler = [one.exn_tab_entry.target] if one.exn_tab_entry and one.opname != "STORE_FAST" else []
    return handler + ([one.target] if one.opcode in JUMP_OPCODES and one.target is not None else [])


def _accesses(one: Instruction) -> tuple[set[str], set[str]]:
    """Return the variables that an instruction reads, and those that it writes. A cell may be read elsewhere."""
    if one.opcode not in HASLOCAL and one.opcode not in HASFREE:
        return set(), set()
    names = set(one.argval) if isinstance(one.argval, tuple) else {one.argval}
    return (set(), names) if one.opname == "STORE_FAST" else (names, set())
