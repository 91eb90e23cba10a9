"""What marks in a source tell of a run, and what need not have run."""

import builtins
import marshal
import time
import traceback

import pytest
import torch

from refold.judge import Program, messages, source, worker
from refold.judge.branches import marked
from refold.judge.errors import Misbehaved

HEAD = "import torch\n"
MODULE = """
import enum

class Kinds(enum.Enum):
    WIDE = "wide"

class ModelNew(torch.nn.Module):
    def __init__(self, width=3, kind=None):
        super().__init__()
        self.width = width
        self.one = torch.ones(1)
        self.kind = kind
        self.bias = torch.nn.Parameter(torch.ones(1)) if width > 2 else None

    def forward(self, x, mask=None):
        {}
        return x
"""


def run(text, *calls, attribute="f", train=False):
    """Return the branches of a source, its namespace, and the marks that it leaves."""
    branches = marked(Program(text, "", attribute), "candidate.py", 1, train, seed=3)
    recorder = worker._Recorder(branches.room)
    space = {branches.recorder: recorder, "__name__": "candidate"}
    exec(marshal.loads(branches.code), space)
    program = space[attribute]() if isinstance(space[attribute], type) else space[attribute]
    for x in calls:
        program(x)
    marks = set(recorder.tensor.nonzero().flatten().tolist())
    for site in branches.sites:
        for kind, place in site.errors.items() if site.places[0] in marks and calls else ():
            ends = raised = True
            while ends and raised:
                recorder.tensor[site.places[0]] = 2 + messages.ERRORS.index(kind)
                try:
                    ends = program(calls[-1]) is None
                except vars(builtins)[kind]:
                    marks.add(place)
                raised = recorder.tensor[site.places[0]] == 1
            if raised:
                marks.discard(place)
    return branches, space, marks


def told(text):
    return marked(Program(text, "", "f"), "candidate.py", 1, False, seed=3)


def left(text, *calls, **options):
    """List what has not run and is not excused."""
    branches, _, marks = run(text, *calls, **options)
    assert marks <= branches.used | {place for site in branches.sites for place in site.errors.values()}
    return [wanted for _, wanted, why in branches.missing(marks) if not why]


FUNCTIONS = {
    "if x.sum() > 9: x = 2 * x": ["never ran"],
    "if x.sum() < 9: x = 2 * x": ["was never false"],
    "x = 2 * x if x.sum() > 9 else x": ["never ran"],
    "x = x * (1 + (x.sum() > 9))": ["was never true"],
    "x = torch.where(x > 9, x, 2 * x)": ["was never true"],
    "x = torch.where(torch.isinf(x), 0, x)": ["was never true"],
    "x = x * (1 + len([n for n in x.shape if n > 9]))": ["never ran", "was never true", "was always zero"],
    "x = x + x.dim() // 9": ["was always zero"],
    "for n in map(str.isupper, 'x'): x = x * (1 + n)": ["was always zero"],
    "x = [x, 2 * x][x.dim() // 9]": ["was never chosen"],
    "x = x * {1: 1}.get(x.dim(), 2)": ["was never chosen"],
    "y = {1: x, 2: 2 * x}\n    x = y[x.dim()]": ["was never chosen"],
    "y = [x, 2 * x]\n    x = y[0] if x is None else y[x.dim()]": ["never ran", "was never chosen"],
    "y = [x, 2 * x]\n    x = y[0] + y[1]": [],
    "x = max((2, x), (x.dim(), 2 * x))[1]": ["was never chosen"],
    "x = sorted([(x.dim(), x), (x.dim() ** 9 + 1, 2 * x)])[0][1]": ["was never chosen"],
    "n = max(x.dim(), 9)": [],
    "x = x * 2 ** -min(0, 9 - x.dim())": ["was always zero"],
    "x = x + (x.sum() - 9).clamp(min=0)": ["was always zero"],
    "x = torch.cat([x[:9], -x[9:]])": ["was always empty"],
    "try:\n        x[9]\n        x = 2 * x\n    except IndexError: pass": ["never came to its end"],
    "try: return (x[9], 2 * x)[1]\n    except IndexError: pass": ["never came to its end"],
    "try:\n        y = 2 * x\n        x[9]\n    except IndexError: pass": ["never came to its end"],
    "with contextlib.suppress(IndexError): x[9]; x = 2 * x": ["never came to its end"],
    "x = (lambda y: y, lambda y: 2 * y)[0](x)": ["never ran"],
    "for _ in range(x.dim() // 9): x = 2 * x": ["never ran"],
    "while x.sum() > 9: x = x / 2": ["never ran"],
    "y = x.sum() > 9 and 2": ["was never true"],
    "if x.dim() > 9: raise ValueError('too many')": [],
    "if x.dim() < 0 or x.numel() == 0: raise ValueError(x)": [],
    "if x.dim() > 9: raise KeyError('which a dictionary may catch')": ["never ran"],
    "assert x.dim() < 9 and x.numel()": [],
    "assert x.dim() < 9 or x.mul_(2) is None": ["was never false"],
    "assert 9 < x.dim() < x.mul_(2).dim() or x.numel()": ["was never true"],
    "if x.dim() > 9:\n        x += 1\n        raise ValueError": ["never ran"],
    "if x.dim() > 9:\n        x[:] = 0\n        raise ValueError": ["never ran"],
    "if x.dim() > 9: print(x.abs().max(), len(x))": [],
    "if x.dim() > 9: print(torch.abs(x, out=x))": ["never ran"],
    "if x.dim() > 9: print([1 for x[:] in x])": ["never ran"],
    "norm = x.mul_\n    if x.dim() > 9: print(norm(2))": ["never ran"],
    "norm = x.mul_\n    if x.dim() > 9: raise ValueError(norm(2))": ["never ran"],
    "ValueError = StopIteration\n    if x.dim() > 9: raise ValueError": ["never ran"],
    f"{'A' * 60} = 1\n    if x.dtype in ({'A' * 60}, 1.5): x = 2 * x": ["never ran"],
    "if x.is_cuda and x.shape[0] % 8 == 0: x = 2 * x": [],
    "if x.dtype in (torch.float16, torch.bfloat16): x = x.float()": [],
    "if x.dtype == [torch.float32, torch.float64][x.dim() > 9]: x = 2 * x": [
        "was never chosen",
        "was never false",
        "was never true",
    ],
    "mask = torch.ones(3, dtype=torch.bool)": [],
    "x = x.masked_fill(torch.arange(3) > 1, 0)": [],
    "if torch.is_autocast_enabled(): x = x.float()": [],
    "match x.dim():\n        case 1: x = 2 * x\n        case _: pass": ["never ran"],
    "match x.dim():\n        case 0: return x": ["never ran"],
    "match x.dim():\n        case 1: return x": ["never was without a case"],
    "match x.dim():\n        case n if n < 9: return x": ["never was without a case"],
    "match x.dim():\n        case 1 | _: return x": [],
    "while x.dim() < 9: return x": ["never ran", "was never false"],
    "n = 1\n    while n < 2: n = n + 1": ["always held once"],
    "n = 1\n    while n < 3: n = n + 1": [],
    "n = 0\n    while n < x.dim(): n += 1": [],
    "for _ in range(x.dim(), 9): return x": ["never ran"],
    "while True:\n        if x.dim(): return x\n        x = x[None]": ["never ran", "was never false"],
    "def g():\n        yield 1\n        yield 2\n    next(g())": ["never ran"],
    "async def g():\n        await h()\n        return x\n    class h:\n        __await__ = lambda _: iter((1,))\n"
    "    g().send(None)": ["never ran"],
    "def g():\n        for n in (0, 1): range(1)[n]\n        return x\n    try: g()\n    except IndexError: pass": [
        "never came to its end",
        "never ran",
    ],
    "with warnings.catch_warnings(): x = 2 * x": [],
    "with contextlib.suppress(ValueError): int('3')": ["was never ended by an error"],
    "with getattr(contextlib, 'sup' + 'press')(ValueError): int('3')": ["was never ended by an error"],
    "with quiet(ValueError): x.unflatten(0, x.shape) ": ["was never ended by an error"],
    "try: int('3')\n    finally: return x": ["was never ended by an error"],
    "try: int('a')\n    except: pass\n    finally: return x": ["never came to its end"],
    "try: int('3')\n    except* OSError: pass": ["never ran"],
}
MANAGERS = "import contextlib\nimport warnings\nfrom contextlib import suppress as quiet\n"


@pytest.mark.parametrize("body", FUNCTIONS)
def test_what_never_ran_is_told(body):
    head = MANAGERS + HEAD if body.startswith("with") else HEAD
    assert sorted(set(left(f"{head}def f(x):\n    {body}\n    return x\n", torch.ones(3)))) == sorted(FUNCTIONS[body])


@pytest.mark.parametrize(
    "more",
    [
        "if not __name__ == '__main__':\n    def f(x): return x\n",
        "def unused(a=HOW.append(lambda: 1)): pass\n",
        "class Unused:\n    def one(): return 1\n    HOW.append(one)\n",
        "def unused(a=HOW.append(1 for _ in 'x')): pass\nHOW[0] = HOW[0].__next__\n",
    ],
)
def test_a_function_to_which_no_name_leads_may_not_run(more):
    text = f"HOW = []\nclass Base: pass\n{more}def f(x): return [how() for how in HOW] and x\n"
    used, _, marks = run(text, 1)
    assert marks - used.used
    used, _, marks = run(text.replace("HOW]", "()]"), 1)
    assert bool(marks - used.used) == ("__main__" in more)


@pytest.mark.parametrize(
    "more",
    [
        "class Used(Base):\n    def __init__(self): pass\nHOW += Base.__subclasses__()\n",
        "def start(): return 1\nclass Unused:\n    first = start()\n",
        "def start(): return 1\ndef unused(first=start()): pass\n",
    ],
)
def test_what_a_definition_runs_and_what_a_class_may_know_has_a_name(more):
    used, _, marks = run(f"HOW = []\nclass Base: pass\n{more}def f(x): return [how() for how in HOW] and x\n", 1)
    assert not marks - used.used


def test_two_calls_may_reach_both_branches():
    text = f"{HEAD}def f(x):\n    return 2 * x if (x > 3).any() else x\n"
    assert left(text, torch.ones(3), torch.tensor([1.0, 4.0])) == []


@pytest.mark.parametrize(
    "body",
    [
        "mask = {9: 2}.get(x.dim()); return g(x, mask)",
        "return [g(x, mask) for mask in [{9: 2}.get(x.dim())]][0]",
        "match {9: 2}.get(x.dim()):\n        case mask: return g(x, mask)",
        "return (lambda mask: g(x, mask))({9: 2}.get(x.dim()))",
        "while True:\n        y, mask = g(x, mask), {9: 2}.get(x.dim())\n        break\n    return y",
    ],
)
def test_an_argument_that_is_set_otherwise_may_be_given(body):
    helper = "def g(y, mask=None):\n    return y if mask is None else 2 * y\n\n\n"
    assert "never ran" in left(f"{HEAD}{helper}def f(x, mask=None):\n    {body}\n", torch.ones(3))
    assert left(f"{HEAD}{helper}def f(x, mask=None):\n    return g(x, mask)\n", torch.ones(3)) == []


MADE = """
class ModelNew(torch.nn.Module):
    def __init__(self, width=3, kind=None):
        super().__init__()
        {}
        self.kind = kind

    def forward(self, x):
        return x if self.kind is None else 2 * x
"""


@pytest.mark.parametrize(
    ("head", "body", "excused"),
    [
        ("", "pass", True),
        ("", "kind = kind if width > 2 else None", True),
        ("import os\n", "kind = os.environ.get('KIND')", False),
        ("import os\nMaybe = os.environ.get\n", "kind = Maybe('KIND')", False),
        ("def Maybe(): return None\n", "kind = Maybe()", False),
        ("from os import getenv as Maybe\n", "kind = Maybe('KIND')", False),
    ],
)
def test_what_a_module_is_made_with_is_fixed_unless_it_is_set_otherwise(head, body, excused):
    assert (left(HEAD + head + MADE.format(body), torch.ones(3), attribute="ModelNew") == []) is excused
    direct = MADE.format("pass").replace("self.kind = kind", f"self.{body}") if "Maybe(" in body else MADE.format(body)
    assert (left(HEAD + head + direct, torch.ones(3), attribute="ModelNew") == []) is excused


METHODS = {
    "if self.bias is not None: x = x + self.bias": [],
    "if self.kind == 'wide': x = 2 * x": [],
    "if mask is not None: x = x * mask": [],
    "if self.training and self.width > 9: x = 2 * x": [],
    "x = {'wide': lambda y: 2 * y}.get(self.kind, lambda y: y)(x)": [],
    "ways = {'wide': lambda y: 2 * y, None: lambda y: y}\n        x = ways[self.kind](x)": [],
    "x = {torch.float16: lambda y: 2 * y}.get(x.dtype, lambda y: y)(x)": [],
    "x = {1: lambda y: y, 2: lambda y: 2 * y}[x.dim()](x)": ["was never chosen"],
    "if self.one: x = 2 * x": ["was never false"],
    "if Kinds.WIDE is None: x = 2 * x": [],
    "self.one = torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled": [],
    "self.kind = x.dim() > 9": ["was never true"],
}


@pytest.mark.parametrize("body", METHODS)
def test_what_is_fixed_when_a_module_is_made_is_excused(body):
    assert left(HEAD + MODULE.format(body), torch.ones(3), attribute="ModelNew") == METHODS[body]


OTHERS = {
    "def g(x): return 2 * x": [],  # nobody mentions it
    "def g(x): return 2 * x\ntable = {3: g}": ["never ran"],
    "def g(x): return 2 * x\nh = lambda x: g(x)": ["never ran", "never ran"],
    "def g(y, mask=None):\n    return y if mask is None else y * mask\nz = g(torch.ones(2))": [],
    "def g(y, mask=None):\n    return y if mask is None else y * mask\nz = g(torch.ones(2), *())": ["never ran"],
    "try:\n    import no_such_library as fast\nexcept ImportError:\n    fast = None\nif fast: g = 1": [],
    "class triton: jit = staticmethod(lambda f: f)\n@triton.jit\ndef g(x):\n    return x\nh = [g]": ["never ran"],
    "def g(x): return x\n@g\ndef h(x): return 3": ["never ran"],
    "def g(x): return getattr(x, 'real')\nz = torch.ones(1) if g(torch.ones(1)) is None else 0": ["never ran"],
    "class Other:\n    def forward(self): return getattr(self, 'n')": [],
    "if __name__ == '__main__':\n    print(f(torch.ones(3)))": [],
    "import os\nDEBUG = os.environ.get('DEBUG') == '1'\nif DEBUG: print('debugging')": [],
    "import logging\nlog = logging.getLogger('x')\nif log.isEnabledFor(10): log.debug('at %s', f)": [],
    "import logging\nlog = logging.getLogger('x')\nlog = f\nif f is None: log.debug('at %s', f)": ["never ran"],
    "class Way: wide = 0\ndef g(x, Way): return 2 * x if Way.wide else x\nz = g(3, type('', (), dict(wide=0)))": [
        "never ran",
    ],
    "class warnings: warn = f\nif f is None: warnings.warn('odd')": ["never ran"],
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING: import json": [],
    "from os import name as TYPE_CHECKING\nif not TYPE_CHECKING: import json": ["never ran"],
    "import os\nDEBUG = os.environ.get('DEBUG') == '1'\nif DEBUG: raise ValueError('not here')": [],
    "import os\nWIDE = os.environ.get('WIDE') == '1'\nsize = 2 if WIDE else 1": ["never ran"],
    "import os\nWIDE = os.environ.get('WIDE') == '1'\nsize = 1 + WIDE": ["was never true", "was always zero"],
    "import os\nWIDE = os.environ.get('WIDE') == '1'\nsize = WIDE and 2": ["was never true", "was never true"],
    "import os\nWIDE = os.environ.get('WIDE') == '1'\nif WIDE: print(1)\nsize = globals()['WIDE']": [
        *("was never true", "never ran", "was never true"),
    ],
    "from builtins import getattr as ask\nif ask(1, 'bit_' + 'count')() > 9: print(1)": ["never ran"],
}


@pytest.mark.parametrize("more", OTHERS)
def test_what_a_file_has_beside_its_program(more):
    assert left(f"{HEAD}def f(x):\n    return x\n{more}\n", torch.ones(3)) == OTHERS[more]


def test_an_error_ends_a_call_only_if_nothing_catches_it():
    text = f"{HEAD}def g(x):\n    if x.dim() > 9:\n        raise ValueError\n\n\ndef f(x):\n    {{}}\n    return x\n"
    assert left(text.format("g(x)"), torch.ones(3)) == []
    pool = "with ThreadPoolExecutor(1) as pool: getattr(pool, 'sub' + 'mit')(g, x)"
    threads = "from concurrent.futures import ThreadPoolExecutor\n"
    assert left(threads + text.format(pool), torch.ones(3)) == ["never ran"]
    assert left(threads + text.format(f"g(x)\n    {pool}"), torch.ones(3)) == ["never ran"]
    caught = "try:\n        g(x)\n    except {}:\n        x = 2 * x"
    assert left(text.format(caught.format("ValueError")), torch.ones(3)) == ["never ran", "never ran"]
    assert left(text.format(caught.format("OSError")), torch.ones(3)) == ["never ran"]
    assert "never ran" in left(
        "import contextlib\n" + text.format("with contextlib.suppress(ValueError): g(x)"), torch.ones(3)
    )


@pytest.mark.parametrize(
    "body",
    [
        "match x.dim():\n        case 1: return x",
        "for n in (2, 1):\n        if x.dim() == n: return x",
        "if x.dim() == 1: return x",
        "if x.dim() == 2: return 2 * x\n    elif x.dim() == 1: return x",
        "if x.dim() == 1 and x.shape[0] == 3: return x",
    ],
)
def test_what_ends_by_an_error_otherwise_need_not_come_to_that(body):
    two = [torch.ones(3), torch.ones(3, 3)][: 2 if "elif" in body else 1]
    assert left(f"{HEAD}def f(x):\n    {body}\n    raise ValueError(x)\n", *two) == []
    assert left(f"{HEAD}def f(x):\n    {body}\n    return 2 * x\n", *two) != []
    assert left(f"{HEAD}def f(x):\n  while True:\n    {body}\n  raise ValueError(x)\n", *two) != []


def test_marks_change_neither_results_nor_lines():
    text = f'''"""Says what it is."""
from __future__ import annotations

{HEAD}
def f(x):
    """Says what it does."""
    y = [t for t in x.flatten() if t > 1 and not t > 3] or [x]
    return f"{{len(y)}} of {{x.shape[0]}}" if x.dim() < 2 else undefined
'''
    _, space, _ = run(text, torch.ones(3))
    assert (space["__doc__"], space["f"].__doc__) == ("Says what it is.", "Says what it does.")
    assert space["f"](torch.tensor([1.0, 2.0, 4.0])) == "1 of 3"
    with pytest.raises(NameError) as error:
        space["f"](torch.ones(2, 2))
    lines = [frame.lineno for frame in traceback.extract_tb(error.tb) if frame.filename == "candidate.py"]
    assert lines == [text[: text.index("undefined")].count("\n") + 1]


CHAINS = {
    "def f0(x): return x.is_cuda": ("def f{1}(x): return f{0}(x) and f{0}(x)", "f59(x)", "on other devices"),
    "A0 = 3": ("A{1} = A{0} + A{0}", "A59 > 9", "if it is made with other arguments"),
    "def f0(x, m=None): return x if m is None else m": (
        "def f{1}(x, m=None): return f{0}(x, m) + f{0}(x, m)",
        "f59(x)",
        "with arguments that no call gives",
    ),
    "class C0(NamedTuple): a: int = 3": (
        "class C{1}(NamedTuple): a: int = C{0}(); b: int = C{0}()",
        "C59() is None",
        "if it is made with other arguments",
    ),
}


@pytest.mark.parametrize("first", CHAINS)
def test_what_refers_twice_to_what_does_so_too_is_looked_at_once(first):
    again, condition, why = CHAINS[first]
    lines = ["from typing import NamedTuple", first, *(again.format(n - 1, n) for n in range(1, 60))]
    sites = told("\n".join([*lines, f"def f(x):\n    if {condition}: x = 2 * x\n    return x\n"])).sites
    assert any(excuse(set()).startswith(why) for site in sites for excuse in site.excuse)


def test_what_is_nested_too_deeply_is_refused_and_is_python():
    text = f"def f(x):\n    return x{' + x' * 3000}\n"
    assert source(text, attribute="f").text == text
    with pytest.raises(Misbehaved, match="nested too deeply") as error:
        told(text)
    assert error.value.check == "C7"


LONG = {
    "def f(x):\n    a = None\n{}    return x\n": "    a = x.dim() if a is None else a\n",
    "class M:\n    def __exit__(self, *a): return None\n{}def f(x): return x\n": (
        "    def __exit__(self, *a):\n        with self: return None\n"
    ),
    "def f(x):\n{}    raise ValueError(x)\n": "    y = x.dim(), x.dim(), x.dim()\n",
}


@pytest.mark.parametrize("text", LONG)
def test_what_is_long_is_marked_in_time_or_refused(text):
    start = time.process_time()
    told(text.format(500 * LONG[text]))
    assert time.process_time() - start < 20
    with pytest.raises(Misbehaved, match="at most") as error:
        told(text.format(20_000 * LONG[text]))
    assert error.value.check == "C7"


def test_kernels_are_told_and_not_marked():
    text = "{}\n@triton.jit\ndef g(x):\n    return x if x > 2 else 3\n\n\ndef f(x):\n    return g(x)\n"
    assert told(text.format("import triton")).unseen == [3]
    assert told(text.format("triton = torch")).unseen == []


def test_code_that_is_made_of_text_is_told():
    for line in ("eval('2 * x')", "types.FunctionType(c, {})", "builtins.exec('x = 2')", "compile(t, '', 'exec')"):
        assert told(f"def f(x):\n    return {line}\n").from_text == [2]
    for line in ("torch.compile(g)(x)", "re.compile('x')", "self.eval()"):
        assert told(f"def f(x):\n    return {line}\n").from_text == []
