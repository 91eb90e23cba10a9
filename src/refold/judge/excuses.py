"""What need not run in a trial: what the form of a condition shows to be out of its reach, and nothing else.

That is another device, dtype, version, package or mode of the modules; arguments that no call gives; what is fixed once
a module is made; and errors that end the call. Whether these forms mean what they say is asked of the whole source: it
may not define such names itself, nor set attributes by names that it computes.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from .messages import ERRORS
from .program import DEFINES
from .tables import Tables, span

_SWALLOWS = {"suppress", "ExitStack", "AsyncExitStack", "raises", "assertRaises"}
# What reads or sets something by a name that may be computed, and methods that say what an attribute is.
_LOOKUPS = {"getattr", "setattr", "delattr", "vars", "globals", "locals", "attrgetter", "methodcaller", "modules",
            "getmembers", "getmembers_static", "getattr_static", "f_globals", "__globals__", "__dict__", "__class__",
            "__getattr__", "__getattribute__", "__setattr__", "__delattr__", "__setstate__"}  # fmt: skip
_ANSWERS = {"__getattr__", "__getattribute__", "__get__"}
_TEXTS = {"exec", "eval", "compile", "__import__", "FunctionType", "CodeType", "CompilationUnit"}
_OPAQUE = {"load_inline", "CDLL", "RawKernel", "pyfunc_decl", "marshal"}
_KERNELS = re.compile(r"(triton\.)?(jit|autotune|heuristics)|(numba\.)?njit")
_OF_LIBRARIES = {*dir(torch.nn.Module), *dir(torch.Tensor), *dir(torch.autograd.Function)}
_ASKS = {"item", "min", "max", "mean", "std", "norm", "abs", "sum", "tolist", "size", "dim", "any", "all", "type",
         "len"}  # fmt: skip
_SAYS = {"str", "repr", "format", "join", "tuple", "list", "sorted", "set", "zip", "isinstance", "keys", "items",
         "stride", "numel", "is_contiguous"}  # fmt: skip
_LOGS = {"debug", "info", "warn", "warning", "error", "exception", "critical", "log"}
_SHOWN = {"extra_repr", "__repr__", "__str__"}
_DERIVATIVES = {"jvp", "vmap", "vjp", "symbolic"}
_PLACE = r"(torch\.\w+|torch\.device\('\w+'\)|[\w.]+\.(dtype|device)|'\w+'|[A-Z_]+)"
_SOMEWHERE = re.compile(
    r"[\w.]+\.is_(cuda|cpu|meta|floating_point|complex)(\(\))?|torch\.is_(floating_point|complex)\([\w.]+\)"
    r"|torch\.[\w.]+\.(is_available|device_count|get_device_capability)\([\w.]*\)( [<>=!]+ [\d(), ]+)?"
    rf"|[\w.]+\.(device|device\.type|dtype|dtype\.itemsize) (==|!=|is|is not|in|not in|<|>) "
    rf"(\d+|{_PLACE}|[([{{]{_PLACE}(, {_PLACE})*,?[)\]}}])"
    r"|torch\.is_autocast_enabled\(('cuda')?\)"
    r"|(sys|torch|triton)\.(__version__|version_info|platform) \S+ ('[^']*'|\(?[\d, ]+\)?)"
)
# Decorators that call nothing by themselves.
_PLAIN = {"torch", "triton", "numba", "functools", "dataclass", "dataclasses", "contextlib", "pytest", "njit", "jit"}
_REGISTERS = re.compile(r"^torch\.(?=library\.)")  # what does so under a name of its own: it calls that
_FAKES = ("register_fake", "register_vmap")
_PACKAGES = {"sys", "torch", "triton"}
_CHANGES = (ast.AugAssign, ast.NamedExpr, ast.Delete, ast.Yield, ast.YieldFrom, ast.Await)
_SIMPLE = (ast.Name, ast.Compare, ast.Constant, ast.expr_context, ast.cmpop)
# Whether a module has a part: one that it was given, or the bias or weight of one that it made.
_ASKED = re.compile(r"self\.(\w+)(?:\.(bias|weight))? is (?:not )?None")
_TRAINING = re.compile(r"(\w+\.)+training")
# What only something of torch may be asked for, if that excuses anything.
PLACES = {"is_cuda", "is_cpu", "is_meta", "device", "dtype", "is_floating_point", "is_complex", "training"}
MADE = "if it is made with other arguments"
_TRIES, _WITHS = (ast.Try, ast.TryStar), (ast.With, ast.AsyncWith)
_OFTEN = 24  # what is set more often is not known
_BY_NAME = 1 << 16  # the place of what is given by its name alone
Function = Any  # of ast: FunctionDef or AsyncFunctionDef; or none
Values = dict[str, list[tuple[ast.expr | None, tuple[int, int], int, int]]]
_Found = TypeVar("_Found")


class Scope(NamedTuple):
    """Where something stands in the source: in which function, and in which class."""

    function: Function = None
    owner: ast.ClassDef | None = None


Call = tuple[ast.Call, Scope]
Stored = tuple[ast.expr | None, Scope]
_ANYWHERE = Scope()


def _once(unknown: Any) -> Callable[[Callable[..., _Found]], Callable[..., _Found]]:
    """Let a method of `Excuses` answer each question only once; what depends on itself is not known."""

    def decorated(method: Callable[..., _Found]) -> Callable[..., _Found]:
        @functools.wraps(method)
        def asked(self: Excuses, *args: Any) -> _Found:
            key = method.__name__, *map(_position, args)
            if key not in self._known:
                self._known[key] = unknown
                self._known[key] = method(self, *args)
            found: _Found = self._known[key]
            return found

        return asked

    return decorated


class Apart(ast.NodeTransformer):
    """Writes what stores several names and constants in attributes at once as one statement for each."""

    def visit_Assign(self, node: ast.Assign) -> Any:
        """Visit a statement."""
        targets, values = (getattr(side, "elts", []) for side in (node.targets[0], node.value))
        plain = all(isinstance(each, ast.Attribute) for each in targets) and len(targets) == len(values) > 0
        if not plain or not all(isinstance(each, (ast.Name, ast.Constant)) for each in values):
            return node
        return [ast.copy_location(ast.Assign([t], v), node) for t, v in zip(targets, values, strict=True)]


class Excuses:
    """What a source as a whole says of its conditions.

    Args:
        tree: The source; it is only read.
        attribute: The class or function that is called.
        given: The arguments that its calls have.
        train: Whether gradients are asked for.

    Attributes:
        from_text: Lines that make code of text, or say what is done to an object that is gone, at whatever time.
        opaque: Lines that call what is compiled.
        looks_up: Whether it may look anything up by a name that it computes.
        tables: From which something is chosen.
        catches: Whether an error in a function may be caught there or in another one.
    """

    def __init__(self, tree: ast.Module, attribute: str, given: int, train: bool):
        self.attribute, self._given, self._train = attribute, given, train
        self.names: Counter[str] = Counter()  # that are read or set
        self._reached: Counter[str] = Counter()  # as attributes, or where they stand in the body of a class
        self._bound: Counter[str] = Counter()
        self._made: set[str] = set()  # names that are bound by something else than an import
        self.strings: set[str] = set()
        self._defined: set[str] = set()
        self._stored: dict[str, list[Stored]] = {}
        self._later: set[str] = set()  # what is stored otherwise than by an object that is made, in itself
        self._calls: dict[str, list[Call]] = {}
        self._short: dict[str, ast.expr | None] = {}  # what functions of one line return
        self._classes: dict[str, ast.ClassDef] = {}
        self._imported: dict[str, str] = {}
        self.functions: dict[int, Function] = {}  # by their lines, as they are before marks are put in
        self._known: dict[tuple[Any, ...], Any] = {}  # what was asked before
        self._body = tree.body
        self._members: dict[str, set[str]] = {}  # what bodies of classes define, and which do
        self.from_text: list[int] = []
        self.opaque: list[int] = []
        self._walk(tree, _ANYWHERE)
        self._available = self._optional_packages(tree)
        self.looks_up = _looks_up(tree)
        self._dynamic = self.looks_up or "__dict__" in self.names or bool(_ANSWERS & self._members.keys())
        self._guards, self._conditions = _guards(tree), _conditions(tree)
        self.tables = Tables(tree, self._only)
        exits = [f for f in self.functions.values() if f.name in ("__exit__", "__aexit__")]
        self._forgets = any(isinstance(n, ast.Return) and n.value and ast.unparse(n.value) not in ("None", "False")
                            for f in exits for n in ast.walk(f))  # errors, in a manager of its own  # fmt: skip
        inner = [n for f in self.functions.values() for n in ast.walk(f)]
        self.catches = any(isinstance(n, _TRIES) or (isinstance(n, _WITHS) and self.swallows(n)) for n in inner)

    def _walk(self, node: ast.AST, at: Scope) -> None:
        for child in ast.iter_child_nodes(node):
            inner = at
            if isinstance(child, (ast.arg, ast.ExceptHandler, ast.pattern)):
                self._bound.update({str(vars(child).get(name)) for name in ("arg", "name", "rest")})
            if isinstance(child, DEFINES[:2]):
                self.functions[child.lineno] = child
                inner = at._replace(function=child)
                self._defined.add(child.name)
                self.from_text += [child.lineno] * (child.name == "__del__")
                self._member(child.name, at)
                self._bound[child.name] += 1
                if isinstance(node, ast.Module) and isinstance(child.body[0], ast.Return):
                    self._short[child.name] = child.body[0].value
            elif isinstance(child, ast.ClassDef):
                inner = Scope(owner=child)
                self._defined.add(child.name)
                self._classes[child.name] = child
                self._defined |= {"metaclass"} if child.keywords else set()
                self._bind(child.name)
            elif isinstance(child, ast.Name):
                self.names[child.id] += 1
                self._reached[child.id] += at.function is None
                if not isinstance(child.ctx, ast.Load):
                    self._bind(child.id)
                    said = isinstance(node, ast.AnnAssign) and node.value is None  # and not defined
                    if at.function is None and not said:
                        self._member(child.id, at)
                if child.id in _TEXTS:
                    self.from_text.append(child.lineno)
            elif isinstance(child, ast.Attribute):
                self._attribute(node, child, at)
            elif isinstance(child, (ast.Import, ast.ImportFrom)):
                for a in child.names:
                    module = child.module if isinstance(child, ast.ImportFrom) else a.name
                    self._defined |= {a.name, str(module)} & _SWALLOWS  # by whatever name
                    if a.asname and a.asname[:1].isupper() and not a.name[:1].isupper():
                        module = ""  # it may be taken for a class
                    self._bind((a.asname or a.name).split(".")[0], str(module))
            elif isinstance(child, ast.Constant) and isinstance(child.value, str):
                self.strings.add(child.value)
                self.from_text += [child.lineno] * (child.value == "__del__")
            elif isinstance(child, ast.Call):
                called = _callee(child).rpartition(".")[2]
                self._calls.setdefault(called, []).append((child, at))
                if called in _OPAQUE:
                    self.opaque.append(child.lineno)
            self._walk(child, inner)

    def _member(self, name: str, at: Scope) -> None:
        if at.owner is not None:
            self._members.setdefault(name, set()).add(at.owner.name)

    def _bind(self, name: str, module: str = "") -> None:
        self._bound[name] += 1
        self._made |= set() if module else {name}
        same = self._imported.get(name, module).split(".")[0] == module.split(".")[0]  # it may be imported twice
        self._imported[name] = module if same and name not in self._made else ""

    def _attribute(self, parent: ast.AST, node: ast.Attribute, at: Scope) -> None:
        self.names[node.attr] += 1
        self._reached[node.attr] += 1
        if not isinstance(node.ctx, ast.Load):
            self.from_text += [node.lineno] * (node.attr == "__del__")
            self._defined.add(node.attr)
            value = parent.value if isinstance(parent, ast.Assign) and node in parent.targets else None
            self._stored.setdefault(node.attr, []).append((value, at))
            own = _is_made_in(at) and ast.unparse(node.value) == next(iter(_arguments(at.function)), "") == "self"
            self._later |= set() if own else {node.attr}
        if node.attr in _TEXTS and ast.unparse(node.value) in ("builtins", "__builtins__", "types", "torch.jit"):
            self.from_text.append(node.lineno)

    def _optional_packages(self, tree: ast.Module) -> set[str]:
        """Return names that only an import says, which may fail, and constants beside it."""
        found: Counter[str] = Counter()
        for each in (each for node in tree.body if isinstance(node, ast.Try) for each in ast.walk(node)):
            if isinstance(each, (ast.Import, ast.ImportFrom)):
                found.update((a.asname or a.name).split(".")[0] for a in each.names)
            if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant):
                found.update(t.id for t in each.targets if isinstance(t, ast.Name))
        return {name for name, count in found.items() if self._bound[name] == count}

    # Blocks.

    @staticmethod
    def leaves(body: list[ast.stmt]) -> bool:
        """Say whether a block may end what it is in otherwise than by an error."""
        return any(isinstance(each, (ast.Return, ast.Break, ast.Continue)) for s in body for each in ast.walk(s))

    def swallows(self, node: Any) -> bool:
        """Say whether a with statement may keep an error from going on."""
        foreign = {self._package(_callee(item.context_expr)) for item in node.items} & {"", "contextlib"}
        return bool(foreign) and bool(self._forgets or self.looks_up or _SWALLOWS & (set(self.names) | self._defined))

    def raises(self, body: list[ast.stmt]) -> str:
        """Name the error that a block raises, if it does nothing else."""
        last = body[-1] if body else None
        if not isinstance(last, ast.Raise) or last.exc is None or (kind := _callee(last.exc)) not in ERRORS:
            return ""
        made = [last.exc.func] if isinstance(last.exc, ast.Call) else []
        return kind if not self._bound[kind] and self.only_asks(body, made) else ""

    def tells(self, body: list[ast.stmt]) -> bool:
        """Say whether a block only prints, logs, or warns of, what it asks tensors."""
        calls = [s.value for s in body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)]
        if not body or len(calls) < len(body) or self._dynamic:
            return False
        return all(map(self._says, calls)) and self.only_asks(body, [call.func for call in calls])

    def _says(self, call: ast.Call) -> bool:
        """Say whether a call prints, logs or warns, by functions of Python."""
        owner, _, name = _callee(call).rpartition(".")
        if not owner or name in self._defined:
            return name == "print" and not self._bound[name] and not self.names["builtins"]
        logger = f"{owner} = logging.getLogger("
        made = any(ast.unparse(n).startswith(logger) for n in self._body) and self._bound[owner] == 1
        module = self._package("logging" if made else owner)
        return name in _LOGS and module in ("logging", "warnings")

    def only_asks(self, nodes: Iterable[ast.AST], others: Iterable[ast.AST] = ()) -> bool:
        """Say whether all that these do, but for other functions that they call, is to ask: nothing is changed."""
        known = set(map(id, others))
        return all(self._asks(n) or id(getattr(n, "func", n)) in known for node in nodes for n in ast.walk(node))

    def _asks(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            owner, _, name = _callee(node).rpartition(".")
            into = any(k.arg in (None, "out") for k in node.keywords)
            own = name in self._defined or (not owner and self._bound[name])
            return name in _ASKS | _SAYS and not own and not into
        stored = isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load)
        return not stored and not isinstance(node, _CHANGES)

    def asks_all(self, call: ast.Call) -> bool:
        """Say whether a call asks each element of a generator, by functions of Python."""
        name = _callee(call)
        return name in ("any", "all") and not self._bound[name] and isinstance(call.args[0], ast.GeneratorExp)

    def is_kernel(self, function: Function) -> bool:
        """Say whether a function is compiled to something else than Python."""
        said = map(_callee, function.decorator_list)
        return any(_KERNELS.fullmatch(name) and self._package(name) in ("triton", "numba") for name in said)

    def uncalled(self, function: Function, owner: ast.ClassDef | None) -> str:
        """Say why a function need not run; empty if it must."""
        name = function.name
        if name == "backward" and not self._train:
            return "where gradients flow"
        if name in _SHOWN or name in _DERIVATIVES or any(map(self._registers, function.decorator_list)):
            return "in other ways to use it"
        empty = all(isinstance(s, (ast.Pass, ast.Expr)) for s in function.body) and self.only_asks(function.body)
        if empty and not self.looks_up and any(_callee(d).endswith("abstractmethod") for d in function.decorator_list):
            return "unused"
        library = name.startswith("__") or (owner is not None and owner.bases and name in _OF_LIBRARIES)
        used = self.looks_up or self._reached[name] or name in self.strings or library
        if owner is None or (used and not self._overridden(function, owner)):
            return ""
        return "where others call it" if owner.name == self.attribute else "unused"

    def _registers(self, decorator: ast.expr) -> bool:
        """Say whether a function is given to torch or to an operator, as what says its shapes or has another axis."""
        owner, _, what = _callee(decorator).rpartition(".")
        made = [d for f in self.functions.values() if f.name == owner for d in f.decorator_list]
        operator = [_callee(d) for d in made] == ["torch.library.custom_op"] and self._bound[owner] == 1
        return what in _FAKES and what not in self._defined and (owner == "torch.library" or operator)

    def _overridden(self, function: Function, owner: ast.ClassDef) -> bool:
        """Say whether a method is one of a class from which the judged one inherits, and has its own in its place."""
        judged = self._classes.get(self.attribute)
        own = {node.name for node in judged.body if isinstance(node, ast.FunctionDef)} if judged is not None else set()
        bases = {ast.unparse(base) for base in judged.bases} if judged is not None else set()
        return owner.name in bases and function.name in own and not (self.looks_up or self.names[function.name])

    # Conditions.

    @_once("")
    def excuse(self, leaf: ast.expr, at: Scope) -> str:
        """Say why a condition may have one value in the whole trial; empty if it may not."""
        if isinstance(leaf, ast.Call) and isinstance(leaf.func, ast.Name) and self._bound[leaf.func.id] == 1:
            inner = self._short.get(leaf.func.id)
            return "" if inner is None else self.excuse(inner, _ANYWHERE)
        if isinstance(leaf, ast.BoolOp):
            parts = [self.excuse(value, at) for value in leaf.values]
            return parts[0] if all(parts) else ""
        said = ast.unparse(leaf)
        if said in self._guards:
            return "where a number is exactly zero"
        named = {n.id for n in ast.walk(leaf) if isinstance(n, ast.Name)}
        if _TRAINING.fullmatch(said):
            return "in another mode of the modules"
        if said.endswith("TYPE_CHECKING") and self._package(said) == "typing":
            return "for type checkers"
        every = self.asked(leaf, at)
        if all(_SOMEWHERE.fullmatch(ast.unparse(each)) for each in every) and not _PACKAGES & named & self._made:
            return "on other devices, for other dtypes or with other versions"
        if named and all(isinstance(n, _SIMPLE) for n in ast.walk(leaf)):
            if named <= self._available:
                return "with other packages"
            if at.function is not None and all(self._never_given(name, at, leaf) for name in named):
                return "with arguments that no call gives"
        return MADE if self._fixed(leaf, at) else ""

    def _bindings(self, function: Function, name: str, leaf: ast.expr) -> list[ast.expr | None]:
        """List what a function may have set a name to before it comes to an expression; None if not plainly."""
        at, row = (leaf.lineno, leaf.col_offset), leaf.lineno
        found = {} if function is None else _values(function)
        set_to = [v for v, end, first, last in found.get(name, ()) if end <= at or first <= row <= last]
        return set_to if len(set_to) <= _OFTEN else [None]

    def only_decides(self, node: ast.Assign) -> bool:
        """Say whether what is set here is read as the condition of blocks and nowhere else.

        As the value of a variable of the environment, which may have the same name, it may be another one where the
        program is used. Then other blocks run there, and these are marked themselves.
        """
        name = node.targets[0].id if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) else ""
        hidden = self._dynamic or ({"getattr", "setattr"} & set(self.names) and name in self.strings)
        return self._bound[name] == 1 and self.names[name] == 1 + self._conditions[name] and not hidden

    @_once(False)
    def _never_given(self, name: str, at: Scope, leaf: ast.expr) -> bool:
        """Say whether an argument has its default in each call, or is one like it, until it comes to an expression."""
        given, (_, default) = self._passed(name, at), _arguments(at.function).get(name, (0, None))
        return given is not None and not self._bindings(at.function, name, leaf) and all(
            isinstance(default, ast.Constant) if arg is None else isinstance(arg, ast.Name)
            and where.function is not None and self._never_given(arg.id, where, arg) for arg, where in given
        )  # fmt: skip

    def _passed(self, name: str, at: Scope) -> list[Stored] | None:
        """List what each call gives for an argument, None where it leaves it out; None if that is not known."""
        function, owner = at.function, at.owner
        bases = self._classes[owner.name].bases if owner is not None and function.name == "forward" else ()
        applied = any(ast.unparse(base).endswith("Function") for base in bases)  # of autograd, as by ``apply``
        place = _arguments(function).get(name, (-1, None))[0] - (owner is not None)
        if place < 0 or self.looks_up or not (applied or all(map(self._is_transparent, function.decorator_list))):
            return None
        if self.attribute == (owner.name if owner is not None and function.name == "forward" else function.name):
            others = self._calls.get("self") or self._calls.get(self.attribute) or "__call__" in self.names
            return None if place < self._given or others or self.names["forward"] else [(None, _ANYWHERE)]
        calls, found = self._calls_of(function.name, owner.name if owner and applied else ""), list[Stored]()
        for call, where in calls or ():
            if any(isinstance(arg, ast.Starred) for arg in call.args) or any(k.arg is None for k in call.keywords):
                return None
            bound = owner is None or applied or re.match(r"(self|super\(\))\.\w+$", _callee(call))
            given = [*call.args[place : place + 2 - bool(bound)], *(k.value for k in call.keywords if k.arg == name)]
            found += [(each, where) for each in given] or [(None, _ANYWHERE)]  # or with self as one
        return None if calls is None else found

    def _calls_of(self, function: str, applied: str) -> list[Call] | None:
        """List the calls that may be of a function, or of one of autograd in this class; None if others may be."""
        if applied:
            calls = [c for c in self._calls.get("apply", []) if _callee(c[0]) == f"{applied}.apply"]
            return calls if len(calls) == self.names[applied] else None
        calls = self._calls.get(function, [])
        if len(calls) != self.names[function] or function in self.strings:
            return None
        if function == "forward":  # then any module may be this one
            every = [call for some in self._calls.values() for call in some]
            called = [c for c in every if re.match(r"self\.|\w+$", _callee(c[0]))]
            calls = calls + [c for c in called if not getattr(builtins, _callee(c[0]), None)]
        return calls

    def _is_transparent(self, decorator: ast.expr) -> bool:
        """Say whether a decorator passes on the arguments of a call as they are."""
        name = _callee(decorator)
        module = self._package(name)
        return module == "torch" or (module == "functools" and name.split(".")[-1] in ("cache", "lru_cache"))

    def _package(self, name: str) -> str:
        """Name the package from which the first part of a name is imported; empty if something else may set it."""
        return self._imported.get(name.split(".")[0], "").split(".")[0]

    @_once({})
    def _meant(self, node: ast.expr, at: Scope) -> dict[Any, tuple[Any, Scope]]:
        """Return the expressions for which a local name stands, by all calls; none if they are not known."""
        if not isinstance(node, ast.Name) or node.id == "self":
            return {_position(node): (node, at)}
        given = self._passed(node.id, at) if node.id in _arguments(at.function) else []
        if at.function is None or given is None:
            return {}
        each = [*((value, at) for value in self._bindings(at.function, node.id, node)), *given]
        found = [{} if value is None else self._meant(value, where) for value, where in each]
        return {key: one for some in found for key, one in some.items()} if all(found) else {}

    def asked(self, leaf: ast.expr, at: Scope) -> list[ast.expr]:
        """Return a condition; where it begins or ends with a local name, with each expression for which that stands."""
        if not isinstance(leaf, ast.Compare):
            return [leaf]
        both = [
            [meant for meant, _ in self._meant(end, at).values()] or [end] for end in (leaf.left, leaf.comparators[-1])
        ]
        asks = [ast.Compare(left, leaf.ops, [*leaf.comparators[:-1], last]) for left, last in itertools.product(*both)]
        return [_placed(each, leaf) for each in asks]

    @_once(False)
    def _fixed(self, node: ast.expr, at: Scope = _ANYWHERE) -> bool:
        """Say whether an expression has one value for all that a module lives."""
        if isinstance(node, (ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.IfExp, ast.Constant)):
            return all(self._fixed(c, at) for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            stores, cls = self._stores(node.attr, at), self._classes.get(at.owner.name) if at.owner else None
            if cls is not None and not self._stored.get(node.attr):
                return self._set_once(node.attr, cls.body)
            return len(stores) == 1 and self._fixed(*stores[0])
        if isinstance(node, ast.Attribute):
            cls = self._classes.get(ast.unparse(node.value))
            if cls is not None and self._bound[cls.name] == 1 and not (cls.keywords or cls.decorator_list):
                return self._set_once(node.attr, cls.body)  # as of an Enum
            named = ast.unparse(node.value) == "torch" and "torch" not in self._made
            of_torch = named and isinstance(getattr(torch, node.attr, None), torch.dtype)
            return of_torch or (not self._changed(node.attr) and self._fixed(node.value, at))
        if isinstance(node, ast.Name):
            values, given = self._bindings(at.function, node.id, node), _arguments(at.function)
            if any(value is None or not self._fixed(value, at) for value in values):
                return False
            if node.id not in given:
                return bool(values) or self._set_once(node.id, self._body)
            constant = all(default is None or self._fixed(default) for _, default in given.values())
            made = at.owner is not None and at.function.name == "__init__" and node.id != next(iter(given))
            return made and constant and self._made_once(at.owner)  # type: ignore[arg-type]
        if isinstance(node, ast.Call):
            return self._is_record(_callee(node)) and all(self._fixed(a, at) for a in _given(node))
        if not isinstance(node, ast.Compare):
            return False
        said, left = ast.unparse(node), node.left
        if is_asked := _ASKED.fullmatch(said):
            stores, others = self._stores(is_asked[1], at), self._stored.get(is_asked[2], ())
            later = is_asked[2] in self._members or not all(_is_made_in(where) for _, where in others)
            return bool(stores) and not later and all(self._is_or_is_none(*store) for store in stores)
        if _ASKED.fullmatch(f"self.{said}"):  # of what a function is given
            part = left.attr if isinstance(left, ast.Attribute) else ""
            found = self._meant(left.value if isinstance(left, ast.Attribute) else left, at).values()
            asked = [(ast.Compare(ast.Attribute(value, part) if part else value, node.ops, node.comparators), where)
                     for value, where in found]  # fmt: skip
            if asked:
                return all(self._fixed(_placed(each, node), where) for each, where in asked)
        return all(self._fixed(c, at) for c in (left, *node.comparators))

    def _set_once(self, name: str, body: list[ast.stmt]) -> bool:
        """Say whether one statement of a body sets a name, to a fixed value, and nothing sets it otherwise."""
        set_here = [n.value for n in body if isinstance(n, (ast.Assign, ast.AnnAssign)) and name in map(
            ast.unparse, n.targets if isinstance(n, ast.Assign) else [n.target])]  # fmt: skip
        once = self._bound[name] == 1 and not self._changed(name)
        return once and all(v is not None and self._fixed(v) for v in set_here or [None])

    def _only(self, name: str, often: int) -> bool:
        """Say whether a name is set once and read so often, and in no other way."""
        return self.names[name] == 1 + often and self._bound[name] <= 1 and not self._hidden(name)

    def _hidden(self, name: str) -> bool:
        """Say whether what is done to something of this name may not be seen."""
        return self._dynamic or name in self.strings

    def _changed(self, name: str) -> bool:
        """Say whether an attribute of this name may be set after its object was made."""
        return self._hidden(name) or name in (self._stored if self._makes_again else self._later)

    @property
    def _makes_again(self) -> bool:
        """Whether what makes an object may do so with one that was made before."""
        made = [call for call, *_ in self._calls.get("__init__", ()) if _callee(call).startswith("super(")]
        return "self" in self._made or self.names["__init__"] > len(made)

    def _is_record(self, name: str) -> bool:
        """Say whether a class of this file, a NamedTuple or a dataclass, has fields alone, which nothing sets."""
        cls = self._classes.get(name, ast.ClassDef("", [], [], [], []))
        kind = [_callee(d) for d in [*cls.bases, *cls.decorator_list]]
        known = len(kind) == 1 and kind[0].split(".")[-1] == ("NamedTuple" if cls.bases else "dataclass")
        known &= self._bound[name] == 1 and not cls.keywords and not self._makes_again
        return known and self._package(kind[0]) in ("typing", "dataclasses") and all(
            isinstance(n, ast.AnnAssign) and not self._changed(ast.unparse(n.target))
            and (n.value is None or self._fixed(n.value))
            for n in cls.body[ast.get_docstring(cls) is not None :]
        )  # fmt: skip

    def _stores(self, name: str, at: Scope) -> list[tuple[ast.expr, Scope]]:
        """List what is stored in an attribute, if that is done where modules of a class are made and nowhere else."""
        stores = self._stored.get(name, [])
        named = [] if at.owner is None else [at.owner.name, *map(ast.unparse, at.owner.bases)]  # also what it inherits
        within = all(v and _is_made_in(made) and made.owner and made.owner.name in named for v, made in stores)
        lost = self._hidden(name) or not within or not all(map(self._is_record, self._members.get(name, ())))
        return [] if lost else stores  # type: ignore[return-value]

    def _is_or_is_none(self, node: ast.expr, at: Scope) -> bool:
        """Say whether it is fixed whether a value is None."""
        if isinstance(node, ast.IfExp):
            arms = (self._is_or_is_none(arm, at) for arm in (node.body, node.orelse))
            return self._fixed(node.test, at) and all(arms)
        name = _callee(node)
        if isinstance(node, ast.Call) and name.rpartition(".")[2][:1].isupper():  # a class makes no None
            first = name.split(".")[0]
            own = first in self._classes and self._bound[first] == 1 and not {"__new__", "metaclass"} & self._defined
            if own or self._package(first):
                return True
        return self._fixed(node, at)

    def _made_once(self, owner: ast.ClassDef) -> bool:
        """Say whether modules of a class are made where the judged one is, from fixed arguments."""
        calls, here = self._calls.get(owner.name, []), (owner.name, owner.lineno)
        if self._hidden(owner.name) or self.names[owner.name] > len(calls):
            return False
        return not calls if owner.name == self.attribute else bool(calls) and all(
            at.owner is not None and (at.owner.name, at.owner.lineno) != here and _is_made_in(at)
            and all(self._fixed(a, at) for a in _given(call)) for call, at in calls
        )  # fmt: skip


def _conditions(tree: ast.Module) -> Counter[str]:
    """Count how often each name stands as the condition of a block, or as a part of one."""
    found: Counter[str] = Counter()
    left = [node.test for node in ast.walk(tree) if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert))]
    while left:
        test = left.pop()
        if isinstance(test, (ast.BoolOp, ast.UnaryOp)):
            left += test.values if isinstance(test, ast.BoolOp) else [test.operand] * isinstance(test.op, ast.Not)
        elif isinstance(test, ast.Name):
            found[test.id] += 1
    return found


def _guards(tree: ast.Module) -> set[str]:
    """List comparisons that only keep a number from being zero: where(v == 0, c, v), v.masked_fill(v == 0, c)."""
    every = Counter(ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Compare))
    found: Counter[str] = Counter()
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and len(call.args) >= 2:
            filled, where = call.func.attr in ("masked_fill", "masked_fill_"), call.func.attr == "where"
            other = call.func.value if filled else call.args[2] if where and len(call.args) == 3 else None
            test = ast.unparse(call.args[0])
            if other is not None and test in [f"{ast.unparse(other)} == {zero}" for zero in ("0", "0.0")]:
                found[test] += 1
    return {text for text, count in found.items() if count == every[text]}


def reachable(body: list[ast.stmt], attribute: str) -> list[ast.stmt]:
    """List the statements of a file, without functions and classes to which no name leads from what runs.

    A class may know those that are made of it.
    """
    left: list[ast.stmt] = []
    found, others, made_of = set[int](), dict[str, list[ast.stmt]](), dict[str, set[Any]]()
    for node in body:
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            made_of.setdefault(ast.unparse(base), set()).add(getattr(node, "name", ""))
        used, name = set(), attribute
        if isinstance(node, DEFINES):
            used, name = {_REGISTERS.sub("", _callee(d)).split(".")[0] for d in node.decorator_list}, node.name
        (left if name == attribute or not used <= _PLAIN else others.setdefault(name, [])).append(node)
    for said in {name for node in body for part in _at_once(node) for name in _names(part)} & others.keys():
        left += others.pop(said)
    while left:
        node = left.pop()
        found.add(id(node))
        names = _names(node) | made_of.get(getattr(node, "name", ""), set())
        for said in list(others) if _looks_up(node) else names & others.keys():
            left += others.pop(said)
    return [node for node in body if id(node) in found]


def _at_once(node: ast.stmt) -> Iterator[ast.AST]:
    """Yield the parts of a function or class that run where it is defined; nothing of other statements."""
    if isinstance(node, DEFINES[:2]):
        yield from (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults))
    elif isinstance(node, ast.ClassDef):
        yield from (*node.bases, *node.keywords, *node.decorator_list)
        for each in node.body:
            yield from _at_once(each) if isinstance(each, DEFINES) else (each,)


def _names(tree: ast.AST) -> set[Any]:
    """List names and constants that stand in a tree."""
    return {getattr(n, "id", None) or getattr(n, "attr", None) or getattr(n, "value", None)
            for n in ast.walk(tree) if isinstance(n, (ast.Name, ast.Attribute, ast.Constant))}  # fmt: skip


def _looks_up(tree: ast.AST) -> bool:
    """Say whether code may look up functions by names that it computes."""
    found = 0
    for node in ast.walk(tree):
        found += isinstance(node, ast.alias) and node.name in _LOOKUPS  # whatever it is called then
        if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) != "self.__dict__":
            found += (node.id if isinstance(node, ast.Name) else node.attr) in _LOOKUPS
        if isinstance(node, ast.Call) and _callee(node) in ("getattr", "setattr") and len(node.args) > 1:
            found -= isinstance(node.args[1], ast.Constant)
    return found > 0


def comparisons(node: ast.Match) -> list[ast.expr]:
    """List comparisons of a subject that tell cases apart; none if something else does so, too."""
    parts = [n for case in node.cases for n in ast.walk(case.pattern) if isinstance(n, ast.pattern)]
    plain = all(isinstance(n, (ast.MatchValue, ast.MatchSingleton, ast.MatchOr, ast.MatchAs)) for n in parts)
    values = compared_to(node.subject, [n.value for n in parts if isinstance(n, ast.MatchValue)])
    single = [ast.Constant(n.value) for n in parts if isinstance(n, ast.MatchSingleton)]
    values += compared_to(node.subject, single, ast.Is)
    return values if plain and not any(c.guard for c in node.cases) else []


def compared_to(node: ast.expr, values: Iterable[ast.expr], how: type[ast.cmpop] = ast.Eq) -> list[ast.expr]:
    """List comparisons of an expression with others."""
    return [_placed(ast.Compare(node, [how()], [value]), node) for value in values]


def _arguments(function: Function) -> dict[str, tuple[int, ast.expr | None]]:
    """Return the arguments of a function: where each is given, -1 of what takes all that are left, and its default."""
    if function is None:
        return {}
    a = function.args
    first, last = [*a.posonlyargs, *a.args], [*a.kwonlyargs]
    places = [*range(len(first)), *[_BY_NAME] * len(last)]
    defaults: list[Any] = [*[None] * (len(first) - len(a.defaults)), *a.defaults, *a.kw_defaults]
    found = {p.arg: (at, d) for p, at, d in zip((*first, *last), places, defaults, strict=True)}
    return found | {p.arg: (-1, None) for p in (a.vararg, a.kwarg) if p is not None}


def _callee(node: ast.expr) -> str:
    """Name what is called by a call; of anything else, as of a decorator without arguments, the thing itself."""
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def _given(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(k.value for k in call.keywords)]


def _is_made_in(at: Scope) -> bool:
    """Say whether modules of a class are made here."""
    return at.function is not None and at.function.name == "__init__"


def _placed(made: ast.expr, where: ast.expr) -> ast.expr:
    """Give an expression that was made here the place of one in the source."""
    return ast.fix_missing_locations(ast.copy_location(made, where))


def _position(it: Any) -> Any:
    """Say which one an expression, a scope or a class is, whatever object stands for it."""
    if isinstance(it, Scope):
        return tuple(map(_position, it))
    if isinstance(it, ast.expr):
        return ast.unparse(it), span(it)
    return getattr(it, "lineno", it)


@functools.lru_cache(64)
def _values(function: Function) -> Values:
    """List what a function sets each name to: None if not by a plain statement, where it ends, the loop that it is in.

    What a statement sets that ends later counts in a loop alone; other bindings, as of a lambda, count in any case.
    """
    found: Values = {}
    left: list[tuple[Any, int, int]] = [(function, 0, -1)]  # nodes, and the first and last line of the outer loop
    body, plain = set(map(id, function.body)), set[int]()
    for n, first, last in left:
        if isinstance(n, (ast.For, ast.AsyncFor, ast.While)) and last < 0:
            first, last = n.lineno, n.end_lineno or 0
        left += [(child, first, last) for child in ast.iter_child_nodes(n)]
        if isinstance(n, (ast.Assign, ast.AnnAssign)):
            targets = n.targets if isinstance(n, ast.Assign) else [n.target]
            value, end = n.value if id(n) in body and len(targets) == 1 else None, (n.end_lineno, n.end_col_offset)
            for t in (t for t in targets if isinstance(t, ast.Name)):
                plain.add(id(t))
                found.setdefault(t.id, []).append((value, end, first, last))  # type: ignore[arg-type]
        said = {vars(n).get(key) for key in ("name", "asname", "rest")} - {None}  # of a case, an import, an error
        said |= {n.id} if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load) and id(n) not in plain else set()
        said |= {p.arg for p in ast.walk(n.args) if isinstance(p, ast.arg)} if isinstance(n, ast.Lambda) else set()
        said |= set(n.names) if isinstance(n, (ast.Global, ast.Nonlocal)) else set()
        for name in said:
            found.setdefault(name, []).append((None, (0, 0), 0, -1))
    return found
