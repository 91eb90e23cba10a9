"""Use an accepted proposal: keep it with its evidence, and run a source only with guards.

`save` copies what a run accepted, with its evidence, into a folder of the user's. A rule and choices are used by
``refold.compile(rules=...)`` and ``refold.compile(choose=...)``, which check them again. A source was tried for some
shapes, dtypes, a device and versions, and is used only for these. For everything else, `guarded` runs the original, and
says so.
"""

from __future__ import annotations

import gc
import hashlib
import json
import operator
import shutil
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..compiler.environment import environment
from ..compiler.private import tree_leaves, tree_map
from ..doctor import installed
from ..errors import ArgumentError, TargetError, warn
from ..judge import source
from ..targets import import_file
from ..verify import roundoff
from .loop import COMPUTING, NAMES

GUARDS = "guards.json"


def accepted(run: Path) -> tuple[str, Path]:
    """Return the kind of what a run accepted, and its file.

    Raises:
        ArgumentError: The run accepted nothing, or the folder holds no run.
    """
    for kind, name in NAMES.items():
        if (run / name).is_file():
            return kind, run / name
    if not (run / "run.jsonl").is_file():
        raise ArgumentError(f"{run} holds no run; name the folder that --run named")
    raise ArgumentError(f"the run in {run} accepted nothing")


def save(run: Path, folder: Path) -> Path:
    """Keep what a run accepted, with its evidence and guards.

    Args:
        run: The folder of the run.
        folder: Where to; made if it does not exist.

    Returns:
        The file that holds the rule, the choices, or the guards of a source.

    Raises:
        ArgumentError: The run accepted nothing, or the folder holds something else of the same name.
    """
    kind, file = accepted(run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"the folder {folder} cannot be made: {error.strerror}") from error
    if kind != "source":
        into = folder / f"{run.resolve().name}.{file.name.removeprefix('accepted.')}"
        _check_free(into)
        shutil.copyfile(file, into)
        shutil.copyfile(run / "accepted.jsonl", into.with_suffix(".evidence.jsonl"))
        return into
    into = folder / GUARDS
    _check_free(into)
    lines = [json.loads(line) for line in (run / "accepted.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (run / "run.jsonl").read_text().splitlines()]
    inputs = next(event["request"]["inputs"] for event in events if event["event"] == "request")
    first, last = lines[0], lines[-1]
    guards = {
        "schema": 2,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "attribute": first["candidate"]["attribute"],
        "inputs": inputs,
        "device": first["terms"]["device"],
        "train": first["terms"]["train"],
        "dtype": first["terms"]["dtype"],
        "versions": _versions(),
        "notes": last["notes"],
        "timing": last["timing"],
    }
    shutil.copyfile(file, folder / "candidate.py")
    (folder / "original.py").write_text(first["original"]["text"])
    shutil.copyfile(run / "accepted.jsonl", folder / "evidence.jsonl")
    into.write_text(json.dumps(guards, indent=1) + "\n")
    return into


def guarded(module: torch.nn.Module, folder: str | Path, *, arguments: Sequence[Any] | None = None) -> Guarded:
    """Put an accepted source in the place of a module, for the inputs that it was tried on.

    The source runs in this process, with your rights: read it first.

    Args:
        module: The original, whose parameters and buffers the replacement shares.
        folder: Where `save` kept the source.
        arguments: What the replacement is made with; None takes ``get_init_inputs()`` of the original's file.

    Returns:
        A module that runs the replacement where the guards hold, and the original elsewhere.

    Raises:
        ArgumentError: The folder holds no guards, or the source is not the one that was accepted.
        TargetError: The source cannot be imported, has other parameters than the module, or would not see the module's.
    """
    folder = Path(folder)
    try:
        guards = json.loads((folder / GUARDS).read_text())
        text = (folder / "candidate.py").read_text()
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{folder} holds no source that was kept by refold apply: {error}") from None
    if guards.get("schema") != 2:
        raise ArgumentError(f"{folder / GUARDS} was kept by another version of refold; apply the run again")
    if hashlib.sha256(text.encode()).hexdigest() != guards["sha256"]:
        raise ArgumentError(f"{folder / 'candidate.py'} is not the source that was accepted; try it again")
    source(text, attribute=guards["attribute"])
    if arguments is None:
        made: Any = getattr(import_file(folder / "original.py"), "get_init_inputs", list)()
        arguments = made if isinstance(made, (list, tuple)) else list(made.values())
    found = getattr(import_file(folder / "candidate.py"), guards["attribute"])
    replacement = found(*arguments) if isinstance(found, type) else found
    if isinstance(replacement, torch.nn.Module):
        before = [weakref.ref(t) for t in (*replacement.parameters(), *replacement.buffers())]
        _share(module, replacement)
        gc.collect()
        if any(own() is not None for own in before):
            raise TargetError(
                "the replacement holds parameters or buffers in other places, too, as in a list, and would go on with "
                "its own values there; let it read them from its attributes"
            )
        replacement.train(guards["train"])  # it runs in no other mode
    return Guarded(module, replacement, guards)


class Guarded(torch.nn.Module):
    """A module with a replacement for the inputs that it was tried on.

    Attributes:
        original: The module.
        fallbacks: How often the original ran, by reason.
    """

    def __init__(self, original: torch.nn.Module, replacement: Any, guards: dict[str, Any]) -> None:
        super().__init__()
        self.original = original
        self.fallbacks: Counter[str] = Counter()
        # Its parameters are the original's, and are counted once.
        self.__dict__["replacement"] = replacement
        self._guards = guards
        self._shared: list[torch.Tensor] = []  # with the replacement, at its last call
        self._compared = False  # with the original, since it was put here or its parameters were replaced
        self._wrong = ""
        self._wanted = [each["value"] if "value" in each else (tuple(each["shape"]), each["dtype"])
                        for each in guards["inputs"]]  # fmt: skip
        changed = [f"{k} {v} instead of {guards['versions'].get(k)}" for k, v in _versions().items()
                   if v != guards["versions"].get(k)]  # fmt: skip
        self._versions = f"versions: {', '.join(changed)}" if changed else ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replacement if the guards hold, else the original."""
        state = [*self.original.parameters(), *self.original.buffers()]
        reason = self._reason(state, args, kwargs)
        if not reason:
            replacement = self.__dict__["replacement"]
            same = len(state) == len(self._shared) and all(map(operator.is_, state, self._shared))
            if isinstance(replacement, torch.nn.Module) and not same:
                # Since the last call they were moved or replaced.
                _share(self.original, replacement)
                self._shared, self._compared = state, False
            if self._compared:
                return replacement(*args)
            reason = self._first_call(replacement, args)
            if not reason:
                return replacement(*args)
        if not self.fallbacks[reason]:
            warn(f"the original runs in place of its accepted replacement: {reason}")
        self.fallbacks[reason] += 1
        return self.original(*args, **kwargs)

    def _first_call(self, replacement: Any, args: Sequence[Any]) -> str:
        """Compare the replacement with the original on copies of the inputs; say what is wrong, and remember it.

        It was judged with other weights and on another machine. Here, it may use weights that it kept. One call is no
        proof, and the bound is wide: the square root of the roundoff.
        """
        buffers = [(b, b.clone()) for b in self.original.buffers()]
        results = []
        with torch.no_grad():
            for program in (self.original, replacement):
                copies = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, args)
                with torch.random.fork_rng(devices=None if self._guards["device"] == "cuda" else []):
                    try:
                        results.append(program(*copies))
                    except Exception as error:
                        if program is self.original:  # which raises it once more, to the caller
                            return "the original itself raised an exception"
                        self._wrong = f"it raised {type(error).__name__} at its first call here"
                for buffer, value in buffers:
                    buffer.copy_(value)
        if not self._wrong and (off := _apart(results[0], results[1], self._guards["dtype"])):
            self._wrong = f"at its first call here it did not give what the original gives: {off}"
        self._compared = not self._wrong
        return self._wrong

    def _reason(self, state: list[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        if self._versions or self._wrong:
            return self._versions or self._wrong
        if kwargs:
            return f"it is called with the keyword arguments {', '.join(kwargs)}"
        leaves = tree_leaves(args)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        got = [_described(x) for x in leaves]
        if got != self._wanted:
            return f"inputs {_listed(got)}, it was tried on {_listed(self._wanted)}"
        if not all(x.is_contiguous() for x in tensors):
            return "its inputs are not contiguous"
        if any(x.device.type != self._guards["device"] for x in state):
            return f"its parameters are not on {self._guards['device']}"
        if any(x.is_floating_point() and x.dtype != getattr(torch, self._guards["dtype"]) for x in state):
            return f"its parameters are not {self._guards['dtype']}"
        if any(x.device.type != self._guards["device"] or type(x) is not torch.Tensor for x in tensors):
            return f"its inputs are not plain tensors on {self._guards['device']}"
        if torch.is_autocast_enabled(self._guards["device"]):
            return "autocast is on, and it was tried without"
        needed = torch.is_grad_enabled() and any(x.requires_grad for x in [*tensors, *state])
        if needed and not self._guards["train"]:
            return "gradients are wanted, and it was tried without"
        if self.original.training != self._guards["train"]:
            return f"it is in {'training' if self.original.training else 'evaluation'} mode, it was not tried in it"
        return ""


def _apart(expected: Any, found: Any, dtype: str) -> str:
    """Say how results differ by more than rounding; empty if they do not."""
    ours, theirs = ([x for x in tree_leaves(each) if isinstance(x, torch.Tensor)] for each in (expected, found))
    if [(x.shape, x.dtype) for x in ours] != [(x.shape, x.dtype) for x in theirs]:
        return "other shapes or dtypes"
    most = roundoff(getattr(torch, dtype)) ** 0.5
    for a, b in zip(ours, theirs, strict=True):
        good = a.isfinite() if a.is_floating_point() or a.is_complex() else torch.ones_like(a, dtype=torch.bool)
        a, b = (x[good].to(torch.complex128 if x.is_complex() else torch.float64) for x in (a, b))
        off, size = float(torch.linalg.vector_norm(b - a)), float(torch.linalg.vector_norm(a))
        if not off <= most * size:
            return f"the relative difference is {off / size if size else off:.1e}"
    return ""


def _described(x: Any) -> Any:
    return (tuple(x.shape), str(x.dtype).removeprefix("torch.")) if isinstance(x, torch.Tensor) else x


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(f"{x[1]}{list(x[0])}" if isinstance(x, tuple) else repr(x) for x in values) or "nothing"


def _versions() -> dict[str, str]:
    return {"refold": environment()["refold"], **installed(COMPUTING)}


def _check_free(path: Path) -> None:
    if path.exists():
        raise ArgumentError(f"{path} exists; name another folder")


def _share(module: torch.nn.Module, replacement: torch.nn.Module) -> None:
    """Make the module's parameters and buffers those of the replacement."""
    for kind in ("named_parameters", "named_buffers"):
        own = dict(getattr(module, kind)())
        theirs = dict(getattr(replacement, kind)())
        if {k: v.shape for k, v in own.items()} != {k: v.shape for k, v in theirs.items()}:
            raise TargetError(
                f"the replacement has {kind.split('_')[1]} {', '.join(theirs) or 'none'}, the module {', '.join(own)}; "
                "it cannot share them"
            )
        for name, value in own.items():
            if theirs[name] is value:
                continue
            *path, last = name.split(".")
            owner = replacement.get_submodule(".".join(path))
            setattr(owner, last, value)
