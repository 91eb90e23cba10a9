"""Which branches of a candidate ran: its source with marks in it, and what of it must have run to be accepted.

The judge puts the marks in and compiles; it runs nothing. The text and the numbers of lines stay as they are. Each
block has one mark, each truth value and each mask two, for true and false, and each part of a sum or a product two, for
zero and others. Where a mark lies is drawn at random among places that nothing writes to, so a program that fills
them all is seen.
"""

from __future__ import annotations

import ast
import copy
import itertools
import marshal
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from . import tables
from .errors import Enough, Misbehaved, Raised
from .excuses import MADE, PLACES, Apart, Excuses, Scope, compared_to, comparisons, reachable
from .messages import ERRORS, Description
from .program import DEFINES, Program

_SPARE = 4  # places for each mark
_WAYS = 64  # that lead to a block, of which it is seen whether an error ends the call
_LONGEST = 40_000  # expressions and statements of a source, for which marks take some ten seconds
_MAIN = "__name__ == '__main__'"
_MAKERS = {"ones", "zeros", "full", "empty"}  # of masks that are the same everywhere, which decide nothing
_VALUE = ("was never true", "was never false")
_CHOSEN = "was never chosen"
_LOOPS, _WAITS = (ast.For, ast.AsyncFor, ast.While), (ast.Yield, ast.YieldFrom, ast.Await)
_RAISES = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return)
Marks = set[int]
Excuse = Callable[[Marks], str]


@dataclass(eq=False)
class Site:
    """A part of the source that must have run, or a value that must have been of two kinds.

    Attributes:
        first: Its first line,
        last: and its last.
        wanted: What is missing, for each place where a mark lies; empty if that may be.
        parent: The block that it is in.
        excuse: Says why a mark may be missing, for each place; empty if it may not.
        value: Whether it is a value, which counts only if it was seen at all.
        name: Of a function.
        errors: Those that something in it raises and does nothing else, and where it is marked that one ends the call.
    """

    first: int
    last: int
    places: list[int]
    wanted: tuple[str, ...]
    parent: Site | None
    excuse: tuple[Excuse, ...]
    value: bool = False
    name: str = ""
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def within(self) -> Iterator[Site]:
        """The block itself and those that it is in."""
        site: Site | None = self
        while site is not None:
            yield site
            site = site.parent

    def __str__(self) -> str:
        lines = f"line {self.first}" if self.first == self.last else f"lines {self.first}-{self.last}"
        return f"{lines} ({self.name})" if self.name else lines


@dataclass
class Branches:
    """A candidate's source with marks.

    Attributes:
        code: What Python runs, as `marshal` writes it.
        recorder: The name of what writes the marks.
        room: How many places there are.
        sites: What is marked.
        mentions: The blocks in which a name stands.
        unseen: Lines of what is compiled, whose branches are not Python's.
        from_text: Lines that make code of text.
        caught: The marks of what catches errors.
    """

    code: bytes
    recorder: str
    room: int
    sites: list[Site]
    mentions: dict[str, list[Site | None]]
    unseen: list[int]
    from_text: list[int]
    caught: Marks
    used: Marks = field(init=False)

    def __post_init__(self) -> None:
        self.used = {place for site in self.sites for place in site.places}

    def missing(self, marks: Marks) -> list[tuple[Site, str, str]]:
        """List what has not run, but for what lies within it: the site, what is missing; and why it is excused."""
        found: list[tuple[Site, str, str]] = []
        for site in self.sites:
            outer = site.parent.within if site.parent is not None else ()
            if any(each.places[0] not in marks for each in outer) or (site.value and not marks & set(site.places)):
                continue
            each = zip(site.places, site.wanted, site.excuse, strict=True)
            found += [(site, wanted, why(marks)) for place, wanted, why in each if wanted and place not in marks]
        excused = {site for site, _, why in found if why and not site.value}
        left = [site for site, _, why in found if not why and site.name]
        while called := [site for site in left if self._only_in(site, excused)]:  # which nothing else mentions
            excused.update(called)
            left = [site for site in left if site not in excused]
        return [(site, wanted, why or ("unused" if site in excused else "")) for site, wanted, why in found]

    def _only_in(self, function: Site, excused: set[Site]) -> bool:
        places = [site for site in self.mentions.get(function.name, []) if site is None or function not in site.within]
        return bool(places) and all(site is not None and excused.intersection(site.within) for site in places)


def marked(program: Program, name: str, given: int, train: bool, seed: int) -> Branches:
    """Put marks into a source, as far as it is its author's and what is called may come to it.

    Args:
        program: The program.
        name: The path under which it is going to run.
        given: The arguments that its calls have.
        train: Whether gradients are asked for.
        seed: Where the marks lie.

    Raises:
        Misbehaved: It cannot be read here, by C7.
    """
    last, attribute = len(program.text) if program.lines is None else program.lines, program.entry or program.attribute
    rng = random.Random(seed)
    try:
        tree = ast.parse(program.text)
        size = sum(isinstance(node, (ast.expr, ast.stmt)) for node in ast.walk(tree))
        if size > _LONGEST:
            raise Misbehaved("C7", f"it has {size} expressions and statements; marks are put into at most {_LONGEST}")
        main = [n for n in tree.body if isinstance(n, ast.If) and _MAIN in ast.unparse(n.test) and not n.orelse]
        own = reachable([node for node in tree.body if node.lineno <= last and node not in main], attribute)
        facts = Excuses(Apart().visit(copy.deepcopy(ast.Module(own, []))), attribute, given, train)
        room = 4 * _SPARE * (1 + size)
        recorder = f"__refold_{rng.getrandbits(64):x}__"
        marker = _Marker(facts, rng.sample(range(room), room // _SPARE), recorder)
        for at, node in enumerate(tree.body):
            if node in main:
                node.body = [ast.copy_location(ast.Expr(marker.barred()), node)]
            elif node.lineno <= last:
                tree.body[at] = marker.visit(node) if node in own else _bar(node, facts, marker.barred)
        code = compile(ast.fix_missing_locations(tree), name, "exec", dont_inherit=True)
    except RecursionError as error:
        reason = "its expressions, or what they refer to, are nested too deeply to put marks into them"
        raise Misbehaved("C7", reason) from error
    unseen = sorted(marker.unseen + facts.opaque)
    made, said = marshal.dumps(code), facts.from_text
    return Branches(made, recorder, room, marker.sites, marker.mentions, unseen, said, marker.caught)


class Cover:
    """Which marks were written in calls that were compared.

    Args:
        branches: The source with marks.
        process: Where it runs.

    Attributes:
        marks: The places of these marks, and of those that say that an error ends the call.
        always: Those of marks that each of these calls wrote.
        forged: Whether there are marks where none is written.
    """

    def __init__(self, branches: Branches, process: Any):
        self._branches, self._process, self._where = branches, process, process.ask("marks", Description)
        self.marks, self.always = Marks(), Marks()
        self._last, self._prepared, self._lost = Marks(), Marks(), Marks()
        self._pending = self._due = self.forged = False

    def asked(self) -> None:
        """Begin a call; what the last one did counts only if it was compared."""
        if not self._pending:
            self._prepared |= self.ran()
        self._write({})
        self._pending = True

    def _write(self, values: dict[int, int]) -> None:
        marks = torch.zeros(self._branches.room, dtype=torch.uint8)
        for place, value in values.items():
            marks[place] = value
        self._process.write(self._where, marks)

    def ran(self) -> Marks:
        """Return the marks of the last call."""
        return set(self._read().nonzero().flatten().tolist())

    def _read(self) -> torch.Tensor:
        found: torch.Tensor = self._process.tensors([self._where], self._branches.room)[0]
        return found

    def compared(self) -> bool:
        """Take over the marks of a call that was compared; say whether there is one that no call before wrote."""
        self._pending, self._last = False, self.ran()
        self._write({})
        ran = self._last | self._prepared
        self.always, new = self.always & ran if self.marks else ran, ran - self.marks
        if new - self._branches.used:
            self.forged = True
            raise Enough("it writes marks itself")
        self.marks |= new
        self._due |= bool(new)
        return bool(new)

    def raise_errors(self, ask: Callable[[], Any]) -> None:
        """If calls ran what is new, make the last one again, with each error that a block in it may raise.

        It must end the call, on each way that leads to its block. What only prepares calls has no part in them.
        """
        due, self._due = self._due, False
        for site in (site for site in self._branches.sites if site.errors and due):
            at = site.places[0]
            for kind, place in site.errors.items():
                ways = (self.ends(ask, at, kind) for _ in range(_WAYS * (at in self._last)))
                found = list(itertools.takewhile(lambda ends: ends is not None, ways))
                self._lost |= Marks() if all(found) else {place}
                self.marks |= {place} if found or at in self._prepared else Marks()
        self.marks -= self._lost

    @property
    def unraised(self) -> list[tuple[int, str, int]]:
        """Blocks that ran, and the errors that were not raised there when a call was made again, as what it keeps."""
        ran = (site for site in self._branches.sites if site.errors and site.places[0] in self.marks)
        each = [(site.places[0], kind, place) for site in ran for kind, place in site.errors.items()]
        return [one for one in each if one[2] not in self.marks | self._lost]

    def ends(self, ask: Callable[[], Any], at: int, kind: str) -> bool | None:
        """Say whether an error in a block ends the call; None if it was not raised."""
        self._write({at: 2 + ERRORS.index(kind)})
        self._pending, ends = True, False
        try:
            ask()
        except Raised:
            ends = True
        return ends if int(self._read()[at]) == 1 else None

    def caught(self) -> bool:
        """Say whether the last call caught an error."""
        return bool(self.ran() & self._branches.caught)

    def enough(self) -> None:
        """Raise `Enough` if there is nothing left to see."""
        later = {place for _, _, place in self.unraised}
        if not self._due and all(why for _, _, why in self._branches.missing(self.marks | later)):
            raise Enough("every branch ran")


def _no(_: Marks) -> str:
    return ""


def _any(*excuses: Excuse) -> Excuse:
    """Excuse what one of some excuses."""
    return lambda marks: next(filter(None, (excuse(marks) for excuse in excuses)), "")


def _every(excuses: list[Excuse]) -> Excuse:
    """Excuse what all of some excuses do, of which there may be more later."""

    def excuse(marks: Marks) -> str:
        found = [each(marks) for each in excuses]
        return next(iter(found), "") * all(found)

    return excuse


def _held(node: ast.expr) -> set[str]:
    """Name the values of which a condition asks more than whether they are None."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
        return set()
    inner = {id(n.value) for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    return {ast.unparse(n) for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute)) and id(n) not in inner}


def _takes_all(pattern: ast.pattern) -> bool:
    """Say whether a pattern fits everything, so that Python allows no case after it."""
    if isinstance(pattern, ast.MatchOr):
        return _takes_all(pattern.patterns[-1])
    return isinstance(pattern, ast.MatchAs) and (pattern.pattern is None or _takes_all(pattern.pattern))


class _Blocks(ast.NodeTransformer):
    """Puts marks where blocks begin, and where they may end otherwise than by their last statement."""

    def __init__(self, facts: Excuses, places: list[int], recorder: str):
        self._facts, self._places, self._recorder, self._bar = facts, places, recorder, places.pop()
        self.sites: list[Site] = []
        self.unseen: list[int] = []
        self.caught = Marks()
        self.mentions: dict[str, list[Site | None]] = {}
        self._parent: Site | None = None
        self._ends: Excuse = _no  # of what keeps a statement from what follows it, if that only raises an error
        self._at = Scope()
        self._foreign: dict[str, int] = {}  # marks of what is asked for its place and is not of torch
        self._held: dict[str, int] = {}  # marks of what is taken for fixed and could be emptied, as a list
        self._tables: dict[Any, list[tuple[Site, list[Excuse]]]] = {}  # by where they are written

    def barred(self, *value: ast.expr) -> Any:
        """Mark what must not run."""
        return self._record("ran", [self._bar], *value)

    def _site(self, body: list[Any], wanted: tuple[str, ...], *excuse: Excuse, **more: Any) -> Site:
        places = [self._places.pop() for _ in wanted]
        excuse = excuse if len(excuse) == len(wanted) else excuse * len(wanted)
        self.sites.append(Site(body[0].lineno, body[-1].end_lineno, places, wanted, self._parent, excuse, **more))
        return self.sites[-1]

    def _record(self, how: str, said: list[Any], *value: Any) -> Any:
        args: list[Any] = [*map(ast.Constant, said), *value]
        call = ast.Call(ast.Attribute(ast.Name(self._recorder, ast.Load()), how, ast.Load()), args, [])
        return ast.copy_location(call, value[0]) if value else call

    def _within(self, place: Site | Scope, visit: Callable[[Any], Any], node: Any) -> Any:
        """Visit what is in a block, or in a function or class."""
        outer = self._parent, self._at
        self._parent, self._at = (place, self._at) if isinstance(place, Site) else (self._parent, place)
        new = visit(node)
        self._parent, self._at = outer
        return new

    def _block(
        self, body: list[ast.stmt], excuse: Excuse = _no, at: Any = None, name: str = "", wanted: str = "never ran"
    ) -> list[ast.stmt]:
        """Put a mark at the beginning of a block, and marks into it."""
        excuse = _any(self._error(body), (lambda _: "and only prints") if self._facts.tells(body) else excuse)
        site = self._site(body or [at], (wanted,), excuse, name=name)
        said = bool(name) and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)  # of itself
        mark = ast.copy_location(ast.Expr(self._record("ran", site.places)), (body[said:] or body or [at])[0])
        inner = self._within(site, self._all, body)
        return [*inner[:said], mark, *inner[said:]]

    def _all(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Visit statements; what follows a loop, or waits for a generator to be asked again, is a block of its own."""
        found, outer = list[ast.stmt](), self._ends
        ends = [self._error(body[-1:])]  # for each, what follows it
        for statement in reversed(body[1:-1]):
            ends.insert(0, ends[0] if self._facts.only_asks([statement]) else _no)
        for at, statement in enumerate(body, 1):
            self._ends = ends[at - 1] if body[at:] else outer
            waits = isinstance(statement, _LOOPS) or any(isinstance(n, _WAITS) for n in ast.walk(statement))
            new = self.visit(statement)
            found += [new] if waits else self._passed(statement, new)
            if body[at:] and waits:
                found += self._block(body[at:])
                break
        self._ends = outer
        return found

    def _passed(self, said: ast.stmt, new: Any) -> list[ast.stmt]:
        """Mark that a statement came to its end, where something may catch an error that it raises."""
        plain = isinstance(said, _RAISES) and not isinstance(said.value, (ast.Constant, type(None)))
        if not plain or not self._facts.catches or self._at.function is None:
            return [new]
        began = self._site([said], ("",), _no)
        ended = self._within(began, lambda body: self._site(body, ("never came to its end",), _no), [said])
        first, last = (ast.copy_location(ast.Expr(self._record("ran", s.places)), said) for s in (began, ended))
        if isinstance(said, ast.Return):
            new.value = self._record("ran", ended.places, new.value)
            return [first, new]
        return [first, new, last]

    def _anew(self, body: list[ast.stmt], *args: Any, **options: Any) -> list[ast.stmt]:
        """Mark a block that does not go on with what follows it."""
        self._ends = _no
        return self._block(body, *args, **options)

    def _to_its_end(self, node: Any) -> list[ast.stmt]:
        """Mark that a loop ended by itself, if it may return before, unless an error is all that follows then."""
        returns = any(isinstance(n, ast.Return) for n in ast.walk(node))
        endless = isinstance(node, ast.While) and isinstance(node.test, ast.Constant)
        if not node.orelse and (endless or not returns):
            return []
        return self._block(node.orelse, _no if node.orelse else self._ends, at=node)

    def _error(self, body: list[ast.stmt]) -> Excuse:
        """Excuse a block that only raises an error, if that ends the call."""
        kind = self._facts.raises(body)
        return self._ending(kind) if kind else _no

    def _ending(self, kind: str) -> Excuse:
        """Excuse what only an error may keep from running or let run, once one was seen to end the call here."""
        if self._parent is None:  # where the file is imported
            return lambda _: "unused"
        place = self._parent.errors.setdefault(kind, self._places[-1])
        if place == self._places[-1]:
            self._places.pop()
        return lambda marks: "unused" * (place in marks)

    def _import(self, node: Any) -> Excuse:
        """Excuse an error that may only occur where other packages are installed."""
        imports = any(isinstance(s, (ast.Import, ast.ImportFrom)) for s in node.body) and self._at.function is None
        return (lambda _: "with other packages") if imports else _no

    def _handler(self, handler: ast.ExceptHandler, excuse: Excuse, wanted: str = "never ran") -> ast.ExceptHandler:
        """Mark what catches an error."""
        first = len(self.sites)
        handler.body = self._block(handler.body, excuse, wanted=wanted)
        self.caught.add(self.sites[first].places[0])
        return handler

    def _unhandled(self, at: ast.stmt, excuse: Excuse) -> ast.ExceptHandler:
        """Mark an error that comes out of a block and that something without a handler keeps from going on."""
        kind = ast.Name("BaseException", ast.Load())
        found = ast.copy_location(ast.ExceptHandler(kind, None, [ast.copy_location(ast.Raise(), at)]), at)
        return self._handler(found, excuse, "was never ended by an error")

    def _arm(self, node: ast.expr, excuse: Excuse = _no, visit: Any = None) -> ast.expr:
        """Mark an expression as a block."""
        site = self._site([node], ("never ran",), excuse)
        return self._record("ran", site.places, self._within(site, visit or self.visit, node))

    def _entries(self, table: Any) -> list[tuple[Site, list[Excuse]]]:
        """Return the entries of a table, each with what may excuse that it was never chosen."""
        entries = self._tables.setdefault(tables.span(table), [])
        for value in () if entries else tables.values(table):
            asks: list[Excuse] = []
            entries.append((self._site([value], (_CHOSEN,), _every(asks)), asks))
        return entries

    def visit_Dict(self, table: Any) -> Any:
        """Visit the entries of a table."""
        if tables.span(table) not in self._facts.tables.places | self._tables.keys():
            return self.generic_visit(table)
        values = tables.values(table)
        for at, (site, _) in enumerate(self._entries(table)):
            site.parent = self._parent
            values[at] = self._within(site, self.visit, values[at])
        return table

    visit_List: Any = visit_Dict
    visit_Tuple: Any = visit_Dict


class _Marker(_Blocks):
    """Puts marks into a tree."""

    # Values.

    def _excuse(self, node: Any) -> tuple[str, Excuse]:
        """Say why a condition may have one value, and return what says so if only torch is asked for places."""
        why = self._facts.excuse(node, self._at)
        parts = [n for each in self._facts.asked(node, self._at) for n in ast.walk(each)]
        own = {ast.unparse(n.value) for n in parts if isinstance(n, ast.Attribute) and n.attr in PLACES}
        held = _held(node) if why == MADE else set()
        self._held |= {n: self._site([node], ("",), _no, value=True).places[0] for n in held - self._held.keys()}

        def excuse(marks: Marks) -> str:
            asked = own if own or not isinstance(node, ast.Call) else self._foreign  # by a function of one line
            asks = [*map(self._held.get, held), *map(self._foreign.get, asked)]
            return "" if any(place in marks for place in asks) else why

        return why, excuse

    def _asked(self, node: ast.Attribute) -> ast.Attribute:
        """Mark whether what is asked for a place is of torch."""
        name, node.value = ast.unparse(node.value), self.visit(node.value)
        if node.attr in PLACES:
            if name not in self._foreign:
                self._foreign[name] = self._site([node], ("",), _no, value=True).places[0]
            node.value = self._record("asked", [self._foreign[name], node.attr], node.value)
        return node

    def _value(self, node: Any, visit: Any = None) -> Any:
        """Mark an expression that may be a truth value or a mask."""
        _, excuse = self._excuse(node)
        new = (visit or self.generic_visit)(node)
        site = self._site([node], _VALUE, excuse, value=True)
        found = self._record("seen", site.places, new)
        found.site = site
        return found

    def _plain(self, node: ast.expr) -> Any:
        """Mark what is in an expression, and not itself."""
        new = self.visit(node)
        if hasattr(new, "site"):
            self.sites.remove(new.site)
            return new.args[-1]
        return new

    def _test(self, node: Any, alone: bool = True, free: Excuse = _no) -> tuple[Any, Callable[[bool, Marks], str]]:
        """Mark the parts of a condition; also return what tells why it never was true, or false.

        A condition that stands alone is told by its blocks; what is free excuses its parts, if those that may be left
        out only ask.
        """
        if not self._facts.only_asks(getattr(node, "values", getattr(node, "comparators", []))[1:]):
            free = _no
        if isinstance(node, ast.BoolOp):
            parts = [self._test(value, False, free) for value in node.values]
            strict = isinstance(node.op, ast.And)  # then one part that is false is enough

            def excuse(wanted: bool, marks: Marks) -> str:
                found = [why(wanted, marks) for _, why in parts]
                return next(filter(None, found), "") if wanted == strict or all(found) else ""

            return ast.copy_location(ast.BoolOp(node.op, [new for new, _ in parts]), node), excuse
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            new, inner = self._test(node.operand, alone, free)
            return ast.copy_location(ast.UnaryOp(node.op, new), node), lambda wanted, marks: inner(not wanted, marks)
        (why, excused), new = self._excuse(node), self._plain(node)
        if alone and not why:
            return new, lambda wanted, marks: ""
        site = self._site([node], _VALUE, _any(excused, free), value=True)
        new = self._record("truth", site.places, new)
        return new, lambda wanted, marks: excused(marks) * (site.places[not wanted] not in marks)

    def _number(self, node: Any) -> Any:
        """Mark whether a part of a sum or a product is ever other than zero."""
        why, _ = self._excuse(node)
        new = self.visit(node)
        constant = isinstance(getattr(node, "operand", node), ast.Constant)
        return new if why or constant else self._other(node, new, "was always zero")

    def _other(self, node: ast.expr, new: Any, wanted: str) -> Any:
        return self._record("number", self._site([node], (wanted, ""), _no, value=True).places, new)

    def _lookup(self, node: Any, table: Any, held: ast.expr, key: ast.expr, *default: ast.expr) -> Any:
        """Mark which entry of a table is chosen, which is a branch by another name."""
        whys = [self._excuse(each)[1] for each in compared_to(key, tables.keys(table))]
        sites = [site for site, _ in self._entries(table)]
        for (_, asks), why in zip(self._entries(table), whys, strict=True):
            asks.append(why)
        sites += [self._site([each], (_CHOSEN,), _every(whys)) for each in default]
        places = tuple(site.places[0] for site in sites)

        def visit(_: Any) -> Any:
            others = [self._within(sites[-1], self.visit, each) for each in default]
            return self._record("chosen", [places], self.visit(held), self.visit(key), *others)

        return self._value(node, visit)

    visit_Compare = _value

    def visit_Call(self, node: ast.Call) -> Any:
        name = ast.unparse(node.func).rpartition(".")[2]
        if looked := self._facts.tables.lookup(node):
            return self._lookup(node, *looked)
        if options := tables.compared(node):
            sites = [self._site([each], (_CHOSEN,), _no) for each in options]
            found = ast.List([self.visit(each) for each in options], ast.Load())
            new = self._record("first", [tuple(site.places[0] for site in sites)], self.visit(node.func), found)
            new.keywords = [self.visit(each) for each in node.keywords]
            return new

        def visit(node: ast.Call) -> Any:
            if isinstance(node.func, ast.Attribute):
                self._mention(node.func.attr)
                node.func = self._asked(node.func)
            else:
                node.func = self.visit(node.func)
            if self._facts.asks_all(node):
                node.args[0].told = True  # type: ignore[attr-defined]  # what each was tells what all are
            node.args, node.keywords = [self.visit(a) for a in node.args], [self.visit(k) for k in node.keywords]
            return node

        return visit(node) if name.removeprefix("new_").split("_")[0] in _MAKERS else self._value(node, visit)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        if looked := self._facts.tables.lookup(node):
            return self._lookup(node, *looked)
        if isinstance(node.value, (ast.List, ast.Tuple)) and not isinstance(node.slice, ast.Slice):
            node.slice = self._number(node.slice)  # it chooses one of some results
        if not isinstance(node.ctx, ast.Load):
            return self.generic_visit(node)
        new, parts = self._value(node), [node.slice, *tables.values(node.slice)]
        if any(isinstance(n, ast.Slice) and (n.lower or n.upper) for n in parts):
            new.args[-1] = self._other(node, new.args[-1], "was always empty")
        return new

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if not isinstance(node.ctx, ast.Load):
            return self.generic_visit(node)
        self._mention(node.attr)
        if ast.unparse(node).startswith("torch.backends."):  # which may be kept to be set back
            return self._asked(node)
        return self._value(node, lambda node: self._kept(ast.unparse(node), self._asked(node)))

    def visit_Name(self, node: ast.Name) -> Any:
        if not isinstance(node.ctx, ast.Load):
            return node
        self._mention(node.id)
        return self._kept(node.id, node)

    def _kept(self, name: str, node: Any) -> Any:
        """Mark whether what is taken for fixed could be emptied."""
        return self._record("kept", [self._held[name]], node) if name in self._held else node

    def _mention(self, name: str) -> None:
        self.mentions.setdefault(name, []).append(self._parent)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            return self._test(node, False)[0]
        return self._value(node) if isinstance(node.op, ast.Invert) else self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        if isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.BitXor)):
            return self._value(node)
        node.left, node.right = self._number(node.left), self._number(node.right)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        node.values = [*(self._test(value, False)[0] for value in node.values[:-1]), self.visit(node.values[-1])]
        return node

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        node.test, why = self._test(node.test)
        node.body, node.orelse = self._arm(node.body, partial(why, True)), self._arm(node.orelse, partial(why, False))
        return node

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        node.args = self.visit(node.args)
        node.body = self._within(self._at._replace(function=None), self._arm, node.body)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> Any:
        node.iter, node.ifs = self.visit(node.iter), [self._test(each, False)[0] for each in node.ifs]
        return node

    def visit_ListComp(self, node: Any) -> Any:
        node.generators = [self.visit(each) for each in node.generators]
        if isinstance(node, ast.DictComp):
            node.key, node.value = self.visit(node.key), self._arm(node.value)
        else:
            node.elt = self._arm(node.elt, visit=self._plain if hasattr(node, "told") else None)
        return node

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    # Statements.

    def visit_If(self, node: ast.If) -> Any:
        said, otherwise = node.test, self._error(node.orelse) if node.orelse else self._ends
        node.test, why = self._test(node.test, free=_any(otherwise, self._error(node.body)))
        wanted = "never ran" if node.orelse else "was never false"
        node.body = self._block(node.body, partial(why, True))
        node.orelse = self._block(node.orelse, _any(otherwise, partial(why, False)), said, wanted=wanted)
        return node

    def visit_While(self, node: ast.While) -> Any:
        once, endless = isinstance(node.body[-1], (ast.Break, ast.Return)), isinstance(node.test, ast.Constant)
        counts = any(isinstance(n, ast.AugAssign) and ast.unparse(n.target) in _held(node.test) for n in node.body)
        node.orelse, (test, why) = self._to_its_end(node), self._test(node.test, alone=not once)
        free = once or endless or counts  # as a for loop does, which may have one turn
        site = None if free else self._site([node.test], ("always held once",), partial(why, False))
        node.test = self._record("again", site.places, test) if site is not None else test
        node.body = self._anew(node.body)
        return node

    def visit_For(self, node: Any) -> Any:
        node.orelse, node.iter, node.target = self._to_its_end(node), self.visit(node.iter), self.visit(node.target)
        node.body = self._anew(node.body)
        return node

    visit_AsyncFor = visit_For

    def visit_With(self, node: Any) -> Any:
        swallows, first, excuse = self._facts.swallows(node), node.body[0], self._import(node)
        node.items, node.body = [self.visit(each) for each in node.items], self._block(node.body)
        if swallows:
            node.body = [ast.Try(node.body, [self._unhandled(first, excuse)], [], [])]
        return node

    visit_AsyncWith = visit_With

    def visit_Try(self, node: Any) -> Any:
        excuse = self._import(node)
        node.body = self._block(node.body)
        node.handlers = [self._handler(handler, excuse) for handler in node.handlers]
        if self._facts.leaves(node.finalbody) and all(handler.type for handler in node.handlers):  # it forgets an error
            node.handlers.append(self._unhandled(node.body[0], excuse))
        node.orelse = self._block(node.orelse, excuse) if node.orelse else []
        node.finalbody = self._all(node.finalbody)
        return node

    visit_TryStar = visit_Try

    def visit_Match(self, node: ast.Match) -> Any:
        ends, excuse = self._ends, _every([self._excuse(each)[1] for each in comparisons(node)])
        node.subject = self.visit(node.subject)
        for case in node.cases:
            case.guard = case.guard and self._test(case.guard)[0]
            case.body = self._block(case.body, excuse)
        if node.cases[-1].guard or not _takes_all(node.cases[-1].pattern):
            none = self._block([], _any(ends, excuse), node, wanted="never was without a case")
            node.cases.append(ast.match_case(ast.MatchAs(), None, none))
        return node

    def visit_Assert(self, node: ast.Assert) -> Any:
        node.test = self._test(node.test, False, self._ending("AssertionError"))[0]
        return node

    def visit_Expr(self, node: ast.Expr) -> Any:
        node.value = self._plain(node.value)
        return node

    def visit_Raise(self, node: Any) -> Any:
        return node

    visit_arg = visit_Raise

    def visit_Assign(self, node: ast.Assign) -> Any:
        if self._facts.only_decides(node):  # the blocks tell what it was
            node.value = self._test(node.value)[0]
            return node
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        node.value = node.value and self.visit(node.value)
        return node

    def visit_FunctionDef(self, node: Any) -> Any:
        if self._facts.is_kernel(node):
            self.unseen.append(node.lineno)
            return node
        why = self._facts.uncalled(node, self._at.owner)
        at = self._at._replace(function=self._facts.functions[node.lineno])
        node.decorator_list, node.args = [self.visit(d) for d in node.decorator_list], self.visit(node.args)
        node.body = self._within(at, partial(self._anew, excuse=lambda _: why, name=node.name), node.body)
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return self._within(Scope(owner=node), self.generic_visit, node)


def _bar(tree: ast.stmt, facts: Excuses, mark: Callable[..., Any]) -> ast.stmt:
    """Mark functions to which no name leads, so that they may not run: nobody looks into them."""
    for node in ast.walk(tree):
        if isinstance(node, DEFINES[:2]) and not facts.is_kernel(node):
            node.body.insert(ast.get_docstring(node) is not None, ast.copy_location(ast.Expr(mark()), node))
        elif isinstance(node, ast.Lambda):
            node.body = mark(node.body)
        elif isinstance(node, ast.GeneratorExp):
            node.elt = mark(node.elt)
    return tree
