"""Rules: a region in index notation, and a program that computes the same; kept in files, used wherever it is found.

A rule says nothing of the world: it was right and faster once, for some sizes on some machine. Wherever its region is
found again, in whatever spelling, it is one more rewrite, and is checked and timed there like those of the compiler's
own passes (`refold.compiler.validate.region`). A file holds names and numbers only, so that a stranger's can be read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.fx import Graph, Node

from ...errors import ArgumentError, ProgramError
from ..ir.builder import Builder, between
from ..ir.fx import value
from ..ir.rewrite import Rewrite, replace_node
from .lower import lower
from .match import Match, match
from .program import SCHEMA, Equations, parse
from .read import read

_LARGEST = 1 << 20
# A program may write values so many times as large as its region's, or of so many elements.
MORE, SMALL = 4, 1 << 24


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: A short name.
        region: What is looked for.
        program: What takes its place; reads inputs of the region by their names.
        evidence: Where it won before: errors, times, machine; shown, and not believed.
    """

    name: str
    region: Equations
    program: Equations
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """A name for this very rule."""
        return hashlib.sha256(f"{self.region.to_json()}\n{self.program.to_json()}".encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return the form in JSON."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "region": self.region.to_dict(),
            "program": self.program.to_dict(),
            "evidence": dict(self.evidence),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Rule:
        """Return the rule that `to_dict` wrote; also from a stranger.

        Raises:
            ProgramError: It is no rule, or one of its programs is outside the grammar.
        """
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            raise ProgramError(f"a rule is an object with schema {SCHEMA}, name, region and program")
        name = data.get("name")
        if not isinstance(name, str) or not re.fullmatch(r"[\w .+-]{1,60}", name):
            raise ProgramError(f"a rule's name has letters, digits, spaces, dots and dashes, not {name!r:.80}")
        evidence = data.get("evidence", {})
        if not isinstance(evidence, Mapping):
            raise ProgramError(f"rule {name}: evidence must be an object")
        region = parse(data.get("region"))
        return cls(name, region, replacement(region, data.get("program")), dict(evidence))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rule to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")


def replacement(region: Equations, data: Any) -> Equations:
    """Read a program that is to take the place of a region, and check that its inputs and its result fit.

    Raises:
        ProgramError: It is outside the grammar, reads something else, or has a result of another shape.
    """
    shapes = {name: _shape(region, name) for name in region.inputs}
    found = parse(data, shapes=shapes)
    if found.shape != region.shape:
        raise ProgramError(f"result: it has shape {found.shape}; the region's has {region.shape}")
    if found.largest > (most := max(MORE * region.largest, SMALL)):
        raise ProgramError(f"it writes a value of {found.largest} elements; for this region at most {most} are allowed")
    return found


def _shape(program: Equations, name: str) -> tuple[int, ...]:
    shape = []
    for group in program.inputs[name]:
        size = 1
        for letter in group:
            size *= program.sizes[letter]
        shape.append(size)
    return tuple(shape)


def read_rules(source: Any) -> tuple[Rule, ...]:
    """Take rules from a file, a folder of files that end with .rule.json, a rule, its data, or several of these.

    Raises:
        ArgumentError: There is no such file, or the file or folder holds no rule.
    """
    if source is None:
        return ()
    if isinstance(source, Rule):
        return (source,)
    if isinstance(source, Mapping):
        return (Rule.from_dict(source),)
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        files = sorted(path.glob("*.rule.json")) if path.is_dir() else [path]
        if not files:
            raise ArgumentError(f"the folder {path} holds no rule; a rule's file ends with .rule.json")
        return tuple(map(_from_file, files))
    if isinstance(source, Iterable):
        return tuple(rule for one in source for rule in read_rules(one))
    raise ArgumentError(f"rules must be files, folders or rules, not {source!r:.80}")


def _from_file(path: Path) -> Rule:
    try:
        if path.stat().st_size > _LARGEST:
            raise ArgumentError(f"rule {path} has more than {_LARGEST} bytes")
        return Rule.from_dict(json.loads(path.read_text()))
    except OSError as error:
        raise ArgumentError(f"rule {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} holds no rule: {error}") from None


def apply_rules(graph: Graph, wanted: Any, rules: Iterable[Rule], notes: list[str]) -> Iterator[Rewrite]:
    """Replace the regions of rules wherever they are found.

    Args:
        graph: An ATen graph.
        wanted: Which sites may be rewritten; a rule's site is its node and its name.
        rules: The rules, the preferred first.
        notes: Gets a sentence for each rule that was found and does not fit.
    """
    for rule in rules:
        reading = read(graph)
        for root in list(graph.nodes):
            site = f"{root.name}:{rule.name}"
            if root.op != "call_function" or not root.users or root not in reading.names or not wanted(site):
                continue
            found = match(rule.region, reading, root)
            if found is None:
                continue
            made = _replaced(rule, root, found, site, notes)
            if made is not None:
                yield made
                graph.eliminate_dead_code()
                reading = read(graph)


def _replaced(rule: Rule, root: Node, found: Match, site: str, notes: list[str]) -> Rewrite | None:
    inside = between(root, found.inputs.values())
    build = Builder(root, inside)
    try:
        program = resized(rule, found.sizes)
        new = lower(program, build, found.inputs)
        if value(new).dtype != value(root).dtype:
            raise ProgramError(f"result: it has dtype {value(new).dtype}, the region's {value(root).dtype}")
        new = build.reshape(new, list(value(root).shape))
        new = build.restride(new, value(root))
    except ProgramError as error:
        build.undo()
        note = f"rule {rule.name} was found at {root.name} and does not fit: {error}"
        if note not in notes:
            notes.append(note)
        return None
    return replace_node(
        root,
        new,
        inside=inside,
        added=build.added,
        name=f"rule {rule.name}",
        why="another program was proposed for it",
        detail="; ".join(str(program).splitlines()),
        multilinear=rule.region.multilinear,
        terms=max(rule.region.terms(), program.terms()),
        site=site,
    )


def resized(rule: Rule, sizes: Mapping[str, int]) -> Equations:
    """Return a rule's program for other sizes of the region's letters.

    Letters that only the program has keep their sizes, such as the length of a chunk, or follow from the others.

    Raises:
        ProgramError: It does not go with these sizes.
    """
    if dict(sizes) == dict(rule.region.sizes):
        return rule.program
    data = rule.program.to_dict()
    region = replace(rule.region, sizes=sizes)
    shapes = {name: _shape(region, name) for name in region.inputs}
    own = {k: v for k, v in data["sizes"].items() if k not in sizes}
    shared = {k: sizes[k] for k, v in data["sizes"].items() if sizes.get(k) and rule.region.sizes[k] == v}
    for kept in (own, {}):
        try:
            found = parse({**data, "sizes": {**shared, **kept}}, shapes=shapes)
        except ProgramError as error:
            reason = error
            continue
        if found.shape == region.shape and found.largest <= max(MORE * region.largest, SMALL):
            return found
        reason = ProgramError(f"result: it has shape {found.shape}; the region's has {region.shape}")
    raise reason
