"""A program in index notation: data in a closed grammar, from anywhere, checked before anything is made of it.

    {"inputs": {"x": "b k", "w": "n k"},
     "sizes": {"b": 1024, "k": 8192, "n": 8192},
     "steps": [{"let": "v[k]", "do": "contract", "of": ["w[n k]"]},
               {"let": "y[b]", "do": "contract", "of": ["x[b k]", "v[k]", 0.5]}],
     "result": "y[b 1]"}

Every axis has a letter (or a word), and every letter one size in the whole program. A value is read as
``name[letters]``: one entry an axis, ``(h p)`` for an axis that is read as two, the inner one last. Letters bind by
position, so that ``x[i k]`` and ``x[j k]`` are two readings of one value. A step's result has the letters that
``let`` gives it; what it reads broadcasts along the letters that it lacks. Values have no axes of size one: an input's
are written ``1`` and are dropped, and the result is laid out with them.

The grammar (`STEPS`) holds contractions, elementwise functions, reductions, scans, changes of size and refold's
operators, and nothing else: no names of PyTorch, no code. A program from a stranger can ask for memory and time, which
are bounded here, and for nothing that is not arithmetic on its inputs. Design decision 2.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import ProgramError
from ..ir.operators import SCAN
from .operations import DTYPES, ELEMENTWISE, FOLDS, OPERATORS, REDUCTIONS

SCHEMA = 1
# Bounds on what a program may ask for.
MOST_STEPS = 400
MOST_AXES = 12
MOST_FACTORS = 12
MOST_ELEMENTS = 1 << 34

Letters = tuple[str, ...]
Groups = tuple[Letters, ...]

_NAME = r"[A-Za-z_][A-Za-z0-9_]{0,40}"
_READING = re.compile(rf"^\s*({_NAME})\s*\[([^\]]*)\]\s*$")
_TOKEN = re.compile(rf"\(|\)|1|{_NAME}|\S+")
_LETTER = re.compile(rf"^{_NAME}$")


@dataclass(frozen=True)
class Read:
    """A value read at letters: for each of its axes the letters that it is made of, outermost first."""

    name: str
    axes: Groups

    @property
    def letters(self) -> Letters:
        """All letters in order."""
        return tuple(letter for group in self.axes for letter in group)

    def __str__(self) -> str:
        return f"{self.name}[{spell(self.axes)}]"


@dataclass(frozen=True)
class Equation:
    """One equation.

    Attributes:
        name: What it defines.
        letters: Its axes.
        do: A word of the grammar.
        of: What it reads: values, or numbers.
        options: By name, such as ``along``; only those that the word has.
    """

    name: str
    letters: Letters
    do: str
    of: tuple[Read | float | int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reads(self) -> list[Read]:
        """The values among what it reads."""
        return [x for x in self.of if isinstance(x, Read)]

    def to_dict(self) -> dict[str, Any]:
        """Return the form in JSON."""
        of: Any = [str(x) if isinstance(x, Read) else _unwritten(x) for x in self.of]
        if self.do in OPERATORS:
            of = dict(zip(self.options["arguments"], of, strict=True))
        options = {k: v for k, v in self.options.items() if k != "arguments"}
        return {"let": f"{self.name}[{' '.join(self.letters)}]", "do": self.do, "of": of, **options}


@dataclass(frozen=True)
class Equations:
    """Steps from inputs to one result; made by `parse`, which checks it, or by a reader that needs no check.

    Attributes:
        inputs: For each input, the groups of letters of its axes; an axis of size one has none.
        sizes: Of all letters.
        steps: In order.
        result: How the last value is laid out.
        dtypes: Of the inputs, as far as they are known; for people and proposers.
    """

    inputs: Mapping[str, Groups]
    sizes: Mapping[str, int]
    steps: tuple[Equation, ...]
    result: Read
    dtypes: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the form in JSON."""
        inputs = {name: spell(groups) for name, groups in self.inputs.items()}
        data: dict[str, Any] = {"inputs": inputs, "sizes": dict(self.sizes)}
        if self.dtypes:
            data["dtypes"] = dict(self.dtypes)
        return {**data, "steps": [step.to_dict() for step in self.steps], "result": str(self.result)}

    def to_json(self) -> str:
        """Return the form in JSON, one step a line."""
        data = self.to_dict()
        steps = ",\n".join("  " + json.dumps(step) for step in data.pop("steps"))
        head = ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in data.items() if k != "result")
        return f'{{{head},\n "steps": [\n{steps}],\n "result": {json.dumps(data["result"])}}}'

    def __str__(self) -> str:
        """Return the program as equations, for people."""
        lines = []
        for step in self.steps:
            data = step.to_dict()
            of = data["of"].items() if isinstance(data["of"], dict) else [("", x) for x in data["of"]]
            words = [f"{k}={v}" if k else str(v) for k, v in of]
            rest = [f"{k}={v}" for k, v in data.items() if k not in ("let", "do", "of")]
            lines.append(f"{data['let']} = {step.do}({', '.join([*words, *rest])})")
        return "\n".join([*lines, f"result {self.result}"])

    @property
    def shape(self) -> tuple[int, ...]:
        """The result's shape."""
        return tuple(math.prod(self.sizes[letter] for letter in group) for group in self.result.axes)

    def defined(self) -> dict[str, Equation]:
        """Return the steps by name."""
        return {step.name: step for step in self.steps}

    @property
    def largest(self) -> int:
        """The number of elements of the largest value, inputs included."""
        values = [tuple(x for group in groups for x in group) for groups in self.inputs.values()]
        values += [step.letters for step in self.steps]
        return max(math.prod(self.sizes[letter] for letter in letters) for letters in values) if values else 1

    @property
    def multilinear(self) -> bool:
        """Whether it is a sum of products of its inputs, with whole and positive factors."""
        return all(
            step.do in ("contract", "add", "concat", "slice", "reshape", "pad")
            and all(isinstance(x, Read) or (x == int(x) and x > 0) for x in step.of)
            and not step.options.get("value")
            for step in self.steps
        )

    def terms(self) -> int:
        """Return how many products are added up for one element, at most."""
        found: dict[str, int] = {}
        most = 1
        for step in self.steps:
            below = [found.get(read.name, 1) for read in step.reads]
            summed = {letter for read in step.reads for letter in read.letters} - set(step.letters)
            count = math.prod(self.sizes[letter] for letter in summed)
            if step.do == "contract":
                found[step.name] = min(count * math.prod(below), 1 << 40)
            elif step.do in FOLDS or step.do in OPERATORS:
                found[step.name] = max([*below, self.sizes.get(str(step.options.get("along")), 1)])
            else:
                found[step.name] = max([*below, count])
            most = max(most, found[step.name])
        return most


def spell(groups: Groups) -> str:
    """Write groups of letters as the grammar has them."""
    return " ".join("1" if not group else group[0] if len(group) == 1 else f"({' '.join(group)})" for group in groups)


def parse(data: Any, *, shapes: Mapping[str, Sequence[int]] | None = None) -> Equations:
    """Read a program and check it.

    Args:
        data: JSON-compatible data, or its text.
        shapes: Of the inputs that there are; the program may use some of them and no others.

    Raises:
        ProgramError: It is outside the grammar, or its axes do not fit; names the step.
    """
    if isinstance(data, str):
        try:
            data = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ProgramError(f"the program is not JSON: {error}") from None
    if not isinstance(data, Mapping):
        raise ProgramError(f"a program is an object with inputs, steps and result, not {data!r:.80}")
    if unknown := sorted(map(str, data.keys() - {"inputs", "sizes", "dtypes", "steps", "result"})):
        raise ProgramError(f"a program has inputs, sizes, dtypes, steps and result; not {', '.join(unknown)}")
    return _Parser(data, shapes).program()


class _Parser:
    def __init__(self, data: Mapping[str, Any], shapes: Mapping[str, Sequence[int]] | None) -> None:
        self.data, self.shapes, self.where = data, shapes, "the program"
        self.sizes: dict[str, int] = {}
        self.values: dict[str, Letters] = {}

    def fail(self, reason: str) -> ProgramError:
        return ProgramError(f"{self.where}: {reason}")

    def program(self) -> Equations:
        data = self.data
        sizes = self._mapping(data.get("sizes", {}), "sizes")
        for letter, size in sizes.items():
            if not _LETTER.match(str(letter)):
                raise self.fail(f"{letter!r} is not a name of an axis; use letters and digits")
            self._bind(str(letter), size)
        inputs: dict[str, Groups] = {}
        for name, text in self._mapping(data.get("inputs"), "inputs").items():
            self.where = f"input {name}"
            inputs[str(name)] = self._input(str(name), text)
        self.where = "the program"
        steps = data.get("steps")
        if not isinstance(steps, Sequence) or isinstance(steps, str) or len(steps) > MOST_STEPS:
            raise self.fail(f"steps must be a list of at most {MOST_STEPS} objects")
        found = tuple(self._step(number, step) for number, step in enumerate(steps))
        self.where = "result"
        result = self._read(data.get("result"))
        dtypes = {str(k): str(v) for k, v in self._mapping(data.get("dtypes", {}), "dtypes").items()}
        return Equations(inputs, dict(self.sizes), found, result, dtypes)

    def _mapping(self, value: Any, what: str) -> Mapping[Any, Any]:
        if not isinstance(value, Mapping):
            raise self.fail(f"{what} must be an object, not {value!r:.80}")
        return value

    def _bind(self, letter: str, size: Any) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MOST_ELEMENTS:
            raise self.fail(f"the size of {letter} must be a positive integer, not {size!r:.40}")
        if self.sizes.setdefault(letter, size) != size:
            raise self.fail(f"{letter} has size {self.sizes[letter]} elsewhere and {size} here; use another letter")

    def _input(self, name: str, text: Any) -> Groups:
        if not _LETTER.match(name):
            raise self.fail("its name must be made of letters and digits")
        groups = self._groups(text)
        if self.shapes is not None:
            if name not in self.shapes:
                raise self.fail(f"there is no such input; there are {', '.join(self.shapes)}")
            shape = self.shapes[name]
            if len(shape) != len(groups):
                raise self.fail(f"it has {len(shape)} axes {tuple(shape)}, not {len(groups)} as in {text!r}")
            for group, size in zip(groups, shape, strict=True):
                self._fit(group, int(size))
        for letter in (letter for group in groups for letter in group):
            if letter not in self.sizes:
                raise self.fail(f"the size of {letter} is not known; name it in sizes")
        self._distinct([letter for group in groups for letter in group])
        self.values[name] = tuple(letter for group in groups for letter in group if self.sizes[letter] != 1)
        return tuple(tuple(letter for letter in group if self.sizes[letter] != 1) for group in groups)

    def _fit(self, group: Letters, size: int) -> None:
        """Let letters make up an axis of a size; one of them may be unknown."""
        unknown = [letter for letter in group if letter not in self.sizes]
        known = math.prod(self.sizes[letter] for letter in group if letter in self.sizes)
        if len(unknown) > 1:
            raise self.fail(f"the sizes of {', '.join(unknown)} are not known; name all but one in sizes")
        if unknown and size % known == 0:
            self._bind(unknown[0], size // known)
        elif unknown or known != size:
            raise self.fail(f"an axis of size {size} is read as ({' '.join(group)}), which makes {known}")

    def _distinct(self, letters: Sequence[str]) -> None:
        for letter in letters:
            if letters.count(letter) > 1:
                raise self.fail(f"{letter} stands for two axes of one value; a diagonal is not read")
        if len(letters) > MOST_AXES:
            raise self.fail(f"{len(letters)} axes are more than the {MOST_AXES} that a value may have")

    def _groups(self, text: Any) -> Groups:
        if not isinstance(text, str):
            raise self.fail(f"axes are written as a text such as 'b t (h p)', not {text!r:.80}")
        groups: list[Letters] = []
        inner: list[str] | None = None
        for token in _TOKEN.findall(text):
            if token == "(" and inner is None:
                inner = []
            elif token == ")" and inner is not None:
                groups.append(tuple(inner))
                inner = None
            elif token == "1" and inner is None:
                groups.append(())
            elif _LETTER.match(token):
                if inner is None:
                    groups.append((token,))
                else:
                    inner.append(token)
            else:
                raise self.fail(
                    f"{token!r} in {text!r} is not an axis; write letters, 1, or (h p) for an axis read as two"
                )
        if inner is not None:
            raise self.fail(f"a bracket in {text!r} is not closed")
        return tuple(groups)

    def _read(self, text: Any, ones: bool = False) -> Read:
        """Read ``name[letters]``, against the value of that name; keep axes of size one only if operators need them."""
        match = _READING.match(text) if isinstance(text, str) else None
        if match is None:
            raise self.fail(f"a value is read as name[letters], such as x[b t d], not {text!r:.80}")
        name, groups = match[1], self._groups(match[2])
        if name not in self.values:
            raise self.fail(f"{name} is not defined before; there are {', '.join(self.values)}")
        own = self.values[name]
        groups = tuple(tuple(letter for letter in group if self.sizes.get(letter) != 1) for group in groups)
        if self.where == "result":
            flat = [letter for group in groups for letter in group]
            self._distinct(flat)
            if sorted(flat) != sorted(own):
                raise self.fail(f"it must have the axes {' '.join(own)} of {name}, not {' '.join(flat)}")
            return Read(name, groups)
        full = tuple(group for group in groups if group)
        if len(full) != len(own):
            raise self.fail(f"{name} has {len(own)} axes, {' '.join(own)}, and is read as {text!r}")
        for group, letter in zip(full, own, strict=True):
            self._fit(group, self.sizes[letter])
        read = Read(name, groups if ones else full)
        self._distinct(list(read.letters))
        return read

    def _number(self, value: Any) -> float | int:
        if value in ("inf", "-inf"):
            return float(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.fail(f"a number or name[letters] is expected, not {value!r:.80}")
        if isinstance(value, int) and abs(value) >= 1 << 53:
            raise self.fail(f"{value} is larger than a number may be")
        return value

    def _step(self, number: int, data: Any) -> Equation:
        self.where = f"step {number}"
        data = dict(self._mapping(data, "a step"))
        let, do, of = data.pop("let", None), data.pop("do", None), data.pop("of", [])
        if not isinstance(do, str) or do not in STEPS:
            raise self.fail(f"do must be one of {', '.join(sorted(STEPS))}; not {do!r:.40}")
        self.where = f"step {number} ({do})"
        match = _READING.match(let) if isinstance(let, str) else None
        if match is None:
            raise self.fail(f"let must be name[letters], not {let!r:.80}")
        name, groups = match[1], self._groups(match[2])
        if name in self.values:
            raise self.fail(f"{name} is defined already; each value is defined once")
        if any(len(group) > 1 for group in groups):
            raise self.fail(f"the axes of {name} are single letters; merge them where it is read, or in the result")
        letters = tuple(letter for group in groups for letter in group)
        self._distinct(letters)
        allowed, required = STEPS[do]
        if unknown := sorted(map(str, data.keys() - set(allowed))):
            raise self.fail(f"it has no option {', '.join(unknown)}; it has {', '.join(allowed) or 'none'}")
        if missing := [option for option in required if option not in data]:
            raise self.fail(f"it needs {', '.join(missing)}")
        options = dict(data)
        if do in OPERATORS:
            arguments = self._mapping(of, "of")
            options["arguments"] = tuple(map(str, arguments))
            of = list(arguments.values())
        if not isinstance(of, Sequence) or isinstance(of, str) or len(of) > MOST_FACTORS:
            raise self.fail(f"of must be a list of at most {MOST_FACTORS} values and numbers, not {of!r:.80}")
        ones = do in OPERATORS
        reads = tuple(self._read(x, ones) if isinstance(x, str) and "[" in x else self._number(x) for x in of)
        step = Equation(name, letters, do, reads, options)
        self._shape(step)
        sizes = [self.sizes[letter] for letter in letters]
        if math.prod(sizes) > MOST_ELEMENTS:
            raise self.fail(f"{name} would have {math.prod(sizes)} elements; at most {MOST_ELEMENTS} are allowed")
        step = Equation(name, tuple(x for x in letters if self.sizes[x] != 1), do, reads, options)
        self.values[name] = step.letters
        return step

    def _shape(self, step: Equation) -> None:
        """Check the axes of a step, and find the sizes of new letters."""
        do, options = step.do, step.options
        read = {letter for x in step.reads for letter in x.letters}
        along = options.get("along")
        if along is not None and not isinstance(along, str):
            raise self.fail(f"along must be a letter, not {along!r:.40}")
        if do in OPERATORS:
            self._operator(step)
        elif do == "position":
            if step.of or step.letters != (along,) or along not in self.sizes:
                raise self.fail("it reads nothing, and its only axis is the letter along, of known size")
        elif do in FOLDS:
            self._counted(step, FOLDS[do])
            if along not in step.letters or any(along not in x.letters for x in step.reads[:2]):
                raise self.fail(f"along must be an axis of its result and of what it reads, not {along!r}")
            if any(along in x.letters for x in step.reads[2:]):
                raise self.fail(f"what it starts from has no axis {along}")
            self._within(step, read)
        elif do in ("slice", "pad", "concat", "reshape"):
            self._resized(step)
        elif do == "contract" or do in REDUCTIONS:
            if do != "contract":
                self._counted(step, (1, 1))
            if not step.reads:
                raise self.fail("it reads no value")
            self._within(step, read, only=do != "contract")
        else:
            if do != "fill":
                self._counted(step, (ELEMENTWISE[do].arguments,) * 2 if do != "cast" else (1, 1))
                if not step.reads:
                    raise self.fail("it reads no value; fill makes a constant")
            self._within(step, read)
            if summed := sorted(read - set(step.letters)):
                raise self.fail(f"its result lacks {', '.join(summed)}, over which only contract and reductions sum")
        if (dtype := options.get("dtype")) is not None and dtype not in DTYPES:
            raise self.fail(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r:.40}")

    def _counted(self, step: Equation, counts: tuple[int, int]) -> None:
        low, high = counts
        if not low <= len(step.of) <= high:
            many = str(low) if low == high else f"{low} to {high}"
            raise self.fail(f"it reads {many} values or numbers, not {len(step.of)}")

    def _within(self, step: Equation, read: Iterable[str], only: bool = False) -> None:
        for letter in step.letters:
            if letter not in self.sizes:
                raise self.fail(f"the size of {letter} is not known; name it in sizes")
            if only and letter not in read:
                raise self.fail(f"{letter} is an axis of its result and of nothing that it reads")

    def _resized(self, step: Equation) -> None:
        """Find the size of the axis that a slice, a pad, a concatenation or a reshape makes."""
        do, options = step.do, step.options
        if any(not isinstance(x, Read) for x in step.of) or not step.reads:
            raise self.fail("it reads values, not numbers")
        if do == "reshape":
            self._counted(step, (1, 1))
            self._within(step, ())
            before = math.prod(self.sizes[letter] for letter in step.reads[0].letters)
            after = math.prod(self.sizes[letter] for letter in step.letters)
            if before != after:
                raise self.fail(f"it makes {after} elements of {before}")
            return
        if do == "concat":
            new = options["along"]
        else:
            self._counted(step, (1, 1))
            fresh = [letter for letter in step.letters if letter not in step.reads[0].letters]
            new = fresh[0] if fresh else options["along"]
        size = 0
        for x in step.reads:
            old = self._replaced(step, x, new)
            if do == "slice" and old is None:
                raise self.fail(f"{x} has no axis {options['along']}")
            if do != "concat" and old is not None and old != options["along"]:
                raise self.fail(f"{x} has no axis {options['along']} where the result has {new}")
            size += 1 if old is None else self.sizes[old]
        if do == "slice":
            start, stop, stride = (options.get("start", 0), options.get("stop", size), options.get("step", 1))
            if not all(isinstance(n, int) and not isinstance(n, bool) for n in (start, stop, stride)) or stride < 1:
                raise self.fail("start, stop and step must be integers, step positive")
            size = len(range(size)[slice(start, stop, stride)])
        elif do == "pad":
            before, after = options.get("before", 0), options.get("after", 0)
            if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (before, after)):
                raise self.fail("before and after must be integers, not negative")
            self._number(options.get("value", 0))
            size += before + after
        if size < 1:
            raise self.fail("nothing would be left")
        if new in step.letters:
            self._bind(new, size)
        elif size != 1:
            raise self.fail(f"its result needs an axis of size {size} in place of {options['along']}")

    def _replaced(self, step: Equation, x: Read, new: str) -> str | None:
        """Return the axis of what is read in whose place the result has a new one; None where it has size one."""
        rest = [letter for letter in step.letters if letter != new]
        if list(x.letters) == rest:
            return None
        at = step.letters.index(new) if new in step.letters else x.letters.index(new) if new in x.letters else -1
        if at < 0 or at >= len(x.letters) or [*x.letters[:at], *x.letters[at + 1 :]] != rest:
            raise self.fail(f"{x} must have the axes {' '.join(rest)} in this order, and one in place of {new}")
        return x.letters[at]

    def _operator(self, step: Equation) -> None:
        spec = OPERATORS[step.do]
        given = dict(zip(step.options["arguments"], step.of, strict=True))
        if unknown := sorted(given.keys() - spec.arguments.keys()):
            raise self.fail(f"it has no argument {', '.join(unknown)}; it has {', '.join(spec.arguments)}")
        if missing := [name for name, optional in spec.arguments.items() if not optional and name not in given]:
            raise self.fail(f"it needs {', '.join(missing)}")
        if not all(isinstance(x, Read) for x in step.of):
            raise self.fail("its arguments are values, not numbers")
        own = self._mapping(step.options.get("options", {}), "options")
        if unknown := sorted(map(str, own.keys() - set(spec.options))):
            raise self.fail(f"it has no option {', '.join(unknown)}; it has {', '.join(spec.options)}")
        wanted = step.options.get("result", spec.results[0])
        if wanted not in spec.results:
            raise self.fail(f"result must be one of {', '.join(spec.results)}, not {wanted!r:.40}")
        self._within(step, ())


def _unwritten(x: float | int) -> Any:
    """Replace what JSON has no word for."""
    return str(x) if isinstance(x, float) and math.isinf(x) else x


def _table() -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return for each word its options, and those that it needs."""
    table: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
        "contract": ((), ()),
        "cast": (("dtype",), ("dtype",)),
        "fill": (("dtype",), ("dtype",)),
        "position": (("along",), ("along",)),
        "reshape": ((), ()),
        "slice": (("along", "start", "stop", "step"), ("along",)),
        "pad": (("along", "before", "after", "value"), ("along",)),
        "concat": (("along",), ("along",)),
    }
    table |= dict.fromkeys((*ELEMENTWISE, *REDUCTIONS), ((), ()))
    table |= {name: (("along", "reverse") if name == SCAN.name else ("along",), ("along",)) for name in FOLDS}
    table |= dict.fromkeys(OPERATORS, (("options", "result"), ()))
    return table


# The words of the grammar: options, and those that are needed.
STEPS = _table()
