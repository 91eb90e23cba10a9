"""`refold.accelerate`: the recurrent layers of one transformers model run on refold's operators (design decision 25).

Each layer gets a subclass of its own class that differs only in its forward. So does each block around a layer, to
carry documents through gradient checkpointing. A class can be restored exactly, copies and replicas keep it, and hooks,
sharding and compilers work with it. A forward that is bound to the instance has none of these properties.
"""

from __future__ import annotations

import copy
import importlib.metadata
from collections import Counter
from collections.abc import Callable, Mapping, Set
from functools import cache, partial, wraps
from itertools import chain
from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from refold.errors import ArgumentError, RefoldError, warn
from refold.integrations import attention, decoding, heads, hybrids, mixers, parts, ranks
from refold.integrations.documents import current, reading, shared, watch
from refold.integrations.graphs import HELD, Graphs, graphs_of
from refold.parallel import Cut

_MAMBA, _MAMBA2 = mixers.Mixer(decoding.mamba, mixers.MAMBA), mixers.Mixer(decoding.mamba2, mixers.MAMBA)
_QWEN = mixers.DeltaRule(("in_proj_qkv",), "in_proj_z", "in_proj_b", "in_proj_a", "norm", "out_proj")
_OLMO = mixers.DeltaRule(("q_proj", "k_proj", "v_proj"), "g_proj", "b_proj", "a_proj", "o_norm", "o_proj")
_KIMI = _OLMO._replace(z="g_a_proj g_b_proj", a="f_a_proj f_b_proj", gate="forget_gate")

MIXERS = {
    "MambaMixer": _MAMBA,
    "FalconMambaMixer": _MAMBA,
    "JambaMambaMixer": _MAMBA,
    "ZambaMambaMixer": mixers.Mixer(mixers.zamba, mixers.MAMBA),
    "Mamba2Mixer": _MAMBA2,
    "BambaMixer": _MAMBA2,
    "GraniteMoeHybridMambaLayer": _MAMBA2,
    "FalconH1Mixer": _MAMBA2,
    "NemotronHMamba2Mixer": _MAMBA2,
    "Zamba2MambaMixer": _MAMBA2,
    "Qwen3NextGatedDeltaNet": _QWEN._replace(qkv=("in_proj_qkvz",), b="in_proj_ba", z="", a="").mixer(),
    "Qwen3_5GatedDeltaNet": _QWEN.mixer(),
    "Qwen3_5MoeGatedDeltaNet": _QWEN.mixer(),
    "Qwen4ExpTextGatedDeltaNet": _QWEN.mixer(),
    "LaraMiniGatedDeltaNet": _QWEN.mixer(),
    "OlmoHybridGatedDeltaNet": _OLMO.mixer(),
    "KimiLinearDeltaAttention": _KIMI.mixer(),
    "Glm5NextTextLinearAttention": _KIMI.mixer(),
    "BailingHybridDeltaAttention": _KIMI._replace(z="g_proj", a="f_proj").mixer(),
    "MiniMaxLightningAttention": mixers.LIGHTNING,
}
"""Name of a layer's class in transformers -> what takes the place of its forward."""

OTHERS = {
    "DeltaNet": "a gated delta rule", "DeltaAttention": "a gated delta rule",
    "LightningAttention": "lightning attention",
    "RecurrentBlock": "a gated linear recurrence (RG-LRU)",
    "RwkvSelfAttention": "RWKV's recurrence", "xLSTMLayer": "xLSTM's recurrence", "mLSTMLayer": "xLSTM's recurrence",
    "ShortConv": "a short convolution", "ShortConvolution": "a short convolution",
    "PLELayer": "an embedding of n-grams with a short convolution",
}  # fmt: skip
"""End of the name of a layer's class -> what the layer is; it has no forward here."""

_MARK = "_refold_acceleration"


class Acceleration:
    """What `accelerate` replaced in a model and what not, and the way back; prints as a table."""

    def __init__(self, model: nn.Module, positions: bool = True, cut: Cut | None = None) -> None:
        self.model, self.positions = model, positions
        self.cut = cut
        """The ranks that share every sequence."""
        self.replaced: dict[str, str] = {}
        """Name of a module -> what its forward was."""
        self.kept: dict[str, str] = {}
        """Name of a recurrent module that runs as it did -> why."""
        self.parts: dict[str, str] = {}
        """Name of a norm, or of a product onto words whose number is no multiple of 8 -> what its forward was.

        On a GPU it is one launch where nothing needs a gradient.
        """
        self._changed: list[nn.Module] = []
        self._hooks: list[Any] = []
        self._attention: list[tuple[Any, str]] = []

    @property
    def graphs(self) -> list[Graphs]:
        """The graphs of a token of each model in here that generates, and why tokens ran without one."""
        return [graphs_of(module) for module in self._changed if _generates(module)]

    def _become(self, module: nn.Module, subclass: Callable[[Any], type]) -> None:
        self._changed.append(module)
        _set_class(module, subclass(type(module)))

    def undo(self) -> None:
        """Put every class and hook back as it was.

        Raises:
            RefoldError: Something else has changed a layer's class since; undo that first. Nothing was changed then.
        """
        for module in self._changed:
            if "_refold_original" not in vars(type(module)):
                raise RefoldError(
                    f"refold.accelerate: the class of a layer was changed to {type(module).__name__} since. Undo what "
                    "changed it first."
                )
        for graphs in self.graphs:
            graphs.forget()
        for module in self._changed:
            _set_class(module, type(module)._refold_original)  # type: ignore[attr-defined]
            vars(module).pop(HELD, None)
        for hook in self._hooks:
            hook.remove()
        for module, before in self._attention:
            module.set_attn_implementation(before)
        self._changed, self._hooks, self._attention = [], [], []
        vars(self.model).pop(_MARK, None)

    def check(self, batch: Mapping[str, Any], tolerance: float = 1e-5) -> dict[str, float]:
        """Compare the model over its ranks with a copy on one device, in float64: the loss, and all gradients.

        The model stays as it is, and so do its gradients. There must be memory for two copies in float64. So check
        before you shard parameters, with a short batch, and without dropout.

        Args:
            batch: The whole batch, with ``labels``, the same on every rank.
            tolerance: The largest difference that may be. Models of transformers round some values to float32.

        Returns:
            ``"loss"``, and the name of each parameter that is trained -> the difference, relative.

        Raises:
            ArgumentError: The model was accelerated without group.
            RefoldError: Something differs by more. All ranks raise.
        """
        if self.cut is None:
            raise ArgumentError("check: the model runs on one device. Call accelerate(model, group=...) first.")
        one, many = (copy.deepcopy(self.model).double() for _ in range(2))
        for model in (one, many):
            if _inherits(model, "PreTrainedModel"):
                cast(Any, model).set_experts_implementation("eager")  # others do not take float64
        vars(one)[_MARK].undo()
        accelerate(one, positions=self.positions, graphs=False)
        found = ranks.differences(one, many, batch, self.cut)
        if bad := sorted((name for name, error in found.items() if error > tolerance), key=lambda name: -found[name]):
            worst = ", ".join(f"{name} {found[name]:.0e}" for name in bad[:8])
            raise RefoldError(
                f"check: {len(bad)} of {len(found)} values over {self.cut.size} ranks differ from one device by more "
                f"than {tolerance:.0e}: {worst}. Train without group until the layer that causes it is found."
            )
        return found

    def heads_plan(self) -> dict[str, Any]:
        """Return a plan for ``torch.distributed.tensor.parallel.parallelize_module``: each rank computes some heads.

        Recurrent layers are cut, and so are attention and MLPs whose projections divide. All ranks have all tokens and
        compute the rest. docs/scale.md says what becomes of parameters and gradients.
        """
        return heads.heads_plan(self.model, self.replaced)

    def __str__(self) -> str:
        """Return one line per kind of layer that was replaced, and one per reason for layers that were not."""
        lines = [f"refold.accelerate: {type(self.model).__name__}, transformers {_version()}"]
        if self.replaced and not self._changed:
            return f"{lines[0]}: undone, everything is as it was"
        replaced = Counter([*self.replaced.values(), *self.parts.values()])
        lines += [f"  {count:4} x {kind} replaced" for kind, count in replaced.items()]
        for reason, count in Counter(self.kept.values()).items():
            first = next(path for path, why in self.kept.items() if why == reason)
            lines.append(f"  {count:4} x kept, such as {first}: {reason}")
        return "\n".join(chain(lines, filter(None, map(str, self.graphs))))

    __repr__ = __str__


def accelerate(model: nn.Module, *, positions: bool = True, graphs: bool = True, group: Any = None) -> Acceleration:
    """Let the recurrent layers of a transformers model run on refold's operators.

    Only this instance changes. Parameters, the cache and its layout, projections and norms stay what they are, so
    ``generate``, training, gradient checkpointing, LoRA, quantised projections and ``torch.compile`` still work. A
    second call changes nothing and returns the same summary. docs/accelerate.md says where results differ on purpose.

    Args:
        model: A transformers model with layers of mamba, falcon_mamba, jamba, zamba, mamba2, bamba, granitemoehybrid,
            falcon_h1, nemotron_h, zamba2, qwen3_next, qwen3_5, qwen3_5_moe, qwen4_exp, lara_mini, olmo_hybrid,
            kimi_linear, glm5_next, bailing_hybrid or minimax, or a module that holds one.
        positions: Whether ``position_ids`` that start again begin a document. Their values must be read for that: one
            synchronisation per call of several tokens on a GPU, and a graph break under ``torch.compile``.
            ``cu_seq_lens_q`` and ``seq_idx`` are always used.
        graphs: Whether a call that reads one token per row, as in ``generate``, may become a CUDA graph on a GPU, or be
            computed by a lean model on the CPU. The summary says how many were, and why others were not.
        group: Ranks that share every sequence: a process group, a 1-D device mesh or a `refold.parallel.Cut`. Each rank
            passes its own tokens, as `refold.parallel.shard` cuts them, to train. docs/scale.md has the rules.

    Returns:
        The summary: ``replaced``, ``kept`` with reasons, ``undo()``; readable when printed.

    Raises:
        ArgumentError: ``model`` is no module. With ``group``: a layer does not know ranks, or the model was accelerated
            without them.

    Warns:
        RefoldWarning: No layer was replaced.

    Example:
        >>> summary = refold.accelerate(model)
        >>> print(summary)
        refold.accelerate: Mamba2ForCausalLM, transformers 5.17.0
            24 x Mamba2Mixer replaced
            25 x Mamba2RMSNorm replaced
    """
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise ArgumentError(f"accelerate: model must be a torch.nn.Module; got {got}. Pass a model, or what holds one.")
    cut = group if group is None or isinstance(group, Cut) else Cut(group)
    if (found := vars(model).get(_MARK)) is not None:
        if cut is not None and cut != found.cut:
            raise ArgumentError(
                "accelerate: the model was accelerated without this group. Call its summary's undo() first."
            )
        return found
    done, known = Acceleration(model, positions, cut), []
    for name, module in model.named_modules():
        kind = _kind(module)
        if kind is not None:
            known.append(name)
            reason = _refusal(module, kind)
            if reason is None:
                done.replaced[name] = kind.__name__
            else:
                done.kept[name] = reason
        elif (what := _other(module)) is not None and not any(name.startswith(f"{path}.") for path in known):
            done.kept[name] = f"{type(module).__name__} is {what}, which refold does not replace"
    if not done.replaced and cut is None:
        warn(f"accelerate: {type(model).__name__} has no layer that refold can replace; it runs as before.\n{done}")
        return done
    if cut is not None:
        ranks.refuse_others(model, done.replaced, done.kept)
    _change(done, graphs and cut is None)
    setattr(model, _MARK, done)
    return done


def _change(done: Acceleration, graphs: bool) -> None:
    """Give modules their classes and hooks."""
    model, positions, cut = done.model, done.positions, done.cut
    modules: list[tuple[str, Any]] = list(model.named_modules())
    owners = {name for name, _ in modules if any(path.startswith(f"{name}.") or not name for path in done.replaced)}
    generating = [module for name, module in modules if graphs and name in owners and _generates(module)]
    last = {module.get_output_embeddings() for module in generating}
    for name, module in modules:
        around = name in owners
        if name in done.replaced:
            done._become(module, _mixer)
        elif (make := _part(module, last)) is not None:
            done.parts[name] = type(module).__name__
            done._become(module, make)
        elif (around or cut is not None) and _inherits(module, "GradientCheckpointingLayer") and not _hidden(module):
            done._become(module, _block)
        elif graphs and around and _generates(module) and not _hidden(module):
            done._become(module, _generator)
        models = [inner for inner in module.modules() if _inherits(inner, "PreTrainedModel")]
        innermost = around and models == [module]
        if not name or (around and _inherits(module, "PreTrainedModel")):
            outer = partial(watch, module, positions) if cut is None else partial(ranks.watch, module, positions, cut)
            done._hooks += attention.watch(module, outer) if innermost and cut is None else outer()
        if innermost and cut is not None and any(hasattr(inner, "is_causal") for inner in module.modules()):
            done._attention.append((module, getattr(module.config, "_attn_implementation", "eager")))
            module.set_attn_implementation(ranks.registered())


def _part(module: nn.Module, last: Set[nn.Module | None]) -> Callable[[Any], type] | None:
    """Choose how to make the subclass of a norm or of a last product; None for any other module."""
    if hasattr(module, "_refold_original") or _hidden(module):
        return None
    if parts.is_norm(module):
        return _norm
    return _head if module in last and decoding.is_head(module) else None


def _kind(module: nn.Module) -> type | None:
    """Return the class of transformers that a layer is of, if there is a forward for it."""
    for kind in type(module).__mro__:
        if kind.__name__ in MIXERS and parts.shipped(kind):
            return kind
    return None


def _other(module: nn.Module) -> str | None:
    """Name a layer that has no forward here and may be taken for one that has; None for any other module."""
    for kind in type(module).__mro__:
        for end, what in OTHERS.items():
            if kind.__name__.endswith(end):
                return what
    recurrent = hasattr(module, "A_log") or "conv1d" in dict(module.named_children())
    return "not known to refold" if recurrent else None


def _refusal(module: nn.Module, kind: type) -> str | None:
    """Return None if a layer can be replaced, else why not."""
    if hasattr(module, "_refold_original"):
        return "it belongs to a model that was accelerated by itself"
    if type(module).forward is not kind.forward:  # type: ignore[attr-defined]
        return f"its class {type(module).__name__} has a forward of its own"
    mixer = MIXERS[kind.__name__]
    if unknown := mixer.unknown_arguments(kind.forward):  # type: ignore[attr-defined]
        return f"refold does not know {', '.join(unknown)}, which its forward takes"
    if unknown := mixer.unknown_parts(module):
        return f"refold does not know {', '.join(unknown)}, which it has"
    return "its forward was replaced on the instance" if _hidden(module) else None


def _hidden(module: nn.Module) -> bool:
    """Whether the forward of a module's class is not what runs, nor what a hook of accelerate's calls."""
    return "forward" in vars(module) and "_old_forward" not in vars(module)


def _inherits(module: nn.Module, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(module).__mro__)


def _generates(module: nn.Module) -> bool:
    return _inherits(module, "PreTrainedModel") and _inherits(module, "GenerationMixin")


def _version() -> str:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _set_class(module: Any, kind: Any) -> None:
    module.__class__ = kind
    if "_old_forward" in vars(module):  # hooks of the package accelerate keep the forward that they wrap there
        module._old_forward = MethodType(kind.forward, module)


@cache
def _mixer(kind: Any) -> type:
    """Return the subclass of a layer's class with refold's forward."""
    mixer = MIXERS[next(base.__name__ for base in kind.__mro__ if base.__name__ in MIXERS)]
    return _subclass(kind, {"forward": mixer.forward})


@cache
def _norm(kind: Any) -> type:
    """Return the subclass of a norm's class that is one launch where it can be."""
    return _subclass(kind, {"forward": parts.norm}, maker="_norm")


@cache
def _head(kind: Any) -> type:
    """Return the subclass of a last product's class that is one launch where it can be."""
    return _subclass(kind, {"forward": decoding.head}, maker="_head")


@cache
def _block(kind: Any) -> type:
    """Return the subclass of a block's class that carries documents to where its forward runs, now or again.

    One of `decoding.BLOCKS` or `hybrids.FORMS` also reads one token by the kernels of a step where `decoding.ready`
    allows it.
    """
    fused: Any = None
    if parts.keeps_forward(kind, decoding.BLOCKS):
        fused = decoding.block
    elif parts.keeps_forward(kind, hybrids.FORMS):
        fused = hybrids.layer

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        found, cut = current(), shared()
        if found is None and cut is None:
            return kind.__call__(self, *args, **kwargs)
        return kind.__call__(self, *args, **{**kwargs, "documents": (found, cut)})

    def forward(self: Any, *args: Any, documents: Any = None, **kwargs: Any) -> Any:
        if documents is None:
            if fused is not None and (found := fused(self, *args, **kwargs)) is not None:
                return found
            return kind.forward(self, *args, **kwargs)
        with reading(*documents):
            return kind.forward(self, *args, **kwargs)

    return _subclass(kind, {"__call__": __call__, "forward": forward}, maker="_block")


@cache
def _generator(kind: Any) -> type:
    """Return the subclass of a model's class that reads one token per row by a CUDA graph where it may.

    It has the name of the class, which checkpoints and ``generate`` look at.
    """

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or len(args) > 1:
            return kind.__call__(self, *args, **kwargs)
        given = {"input_ids": args[0], **kwargs} if args else kwargs
        return graphs_of(self).call(self, kind.__call__, given)

    @wraps(kind.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        with graphs_of(self).generating(args, kwargs):
            return kind.generate(self, *args, **kwargs)

    return _subclass(kind, {"__call__": __call__, "generate": generate}, kind.__name__, "_generator")


def _subclass(kind: type, members: dict[str, Any], name: str = "", maker: str = "_mixer") -> type:

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        reduced: Any = object.__reduce_ex__(self, protocol)
        return (_renew, (kind, maker), *reduced[2:])

    members |= {"_refold_original": kind, "__reduce_ex__": __reduce_ex__, "__module__": __name__}
    return type(name or f"Accelerated{kind.__name__}", (kind,), members)


def _renew(kind: Any, maker: str) -> Any:
    """Make an empty module of a class that ``maker`` gave, for copies and pickles."""
    ours = globals()[maker](kind)
    return ours.__new__(ours)
