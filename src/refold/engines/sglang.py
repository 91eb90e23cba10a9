"""The plugin for SGLang (`sglang.srt.plugins`): the backend ``refold`` of linear attention.

It adds the name to the choices, and hooks what calls kernels, both by SGLang's own registries: the dispatchers of gated
DeltaNet and Kimi delta attention layers, and the two functions that Mamba-2 layers call. Who does not ask for refold
gets what SGLang would have called.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from refold.engines import doors
from refold.errors import BackendUnsupported

ENGINE, NAME = "sglang", "refold"
LINEAR = "sglang.srt.layers.attention.linear"
PHASES = ("decode", "extend")
FLAGS = {"decode": "linear_attn_decode_backend", "extend": "linear_attn_prefill_backend"}


@dataclass(frozen=True)
class Door:
    """Where SGLang chooses the kernels of a kind of layer.

    Attributes:
        layers: The kind, for a person.
        kernels: The module and class of its Triton kernels.
        dispatcher: What is hooked.
        adapters: By phase. Verification of drafts stays with SGLang's kernel.
    """

    layers: str
    kernels: tuple[str, str]
    dispatcher: str
    adapters: dict[str, str]


DOORS = (
    Door(
        "gated DeltaNet", (f"{LINEAR}.kernels.gdn_triton", "TritonGDNKernel"),
        f"{LINEAR}.gdn_backend.GDNKernelDispatcher.__init__",
        {"decode": "gated_delta_decode", "extend": "gated_delta_extend"},
    ),
    Door(
        "Kimi delta attention", (f"{LINEAR}.kernels.kda_triton", "TritonKDAKernel"),
        f"{LINEAR}.kda_backend.KDAKernelDispatcher.__init__",
        {"decode": "kimi_delta_decode", "extend": "kimi_delta_extend"},
    ),
)  # fmt: skip
MAMBA = {
    "extend": ("sglang.srt.layers.attention.mamba.mamba.mamba_chunk_scan_combined", "chunk_scan_packed"),
    "decode": ("sglang.kernels.ops.mamba.triton_ops.ssu_dispatch.TritonSSUBackend.__call__", "slot_update"),
}
"""By phase of Mamba-2 layers: what is hooked, and the adapter. The second is of Mamba-1 layers, too."""


def register() -> None:
    """Make ``--linear-attn-backend refold`` legal; again, nothing. Nothing, too, without SGLang."""
    if importlib.util.find_spec(ENGINE) is None:
        return
    log, version = doors.log(ENGINE), doors.version(ENGINE)
    try:
        choices = importlib.import_module("sglang.srt.arg_groups.choices")
        hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
        if NAME in choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES:
            return
        around, add = hooks.HookType.AROUND, choices.add_linear_attn_kernel_backend_choices
        for door in DOORS:
            hooks.HookRegistry.register(door.dispatcher, functools.partial(dispatch, door), around)
        for phase, (target, _) in MAMBA.items():
            hooks.HookRegistry.register(target, functools.partial(mamba, phase), around)
        add([NAME])
    except Exception as error:  # another version: SGLang goes on without refold
        log.warning("refold: there is no backend refold in sglang %s: %s", version, error)
    else:
        log.info("refold: sglang %s has the backend refold (--linear-attn-backend refold)", version)


def _flags() -> Any:
    return importlib.import_module("sglang.srt.runtime_context").get_exec().mamba


def wanted(phase: str) -> bool:
    """Tell whether SGLang was started with refold for a phase."""
    try:
        flags = _flags()
        return bool((getattr(flags, FLAGS[phase]) or flags.linear_attn_backend) == NAME)
    except (ImportError, AttributeError) as error:
        doors.kept(ENGINE, phase, f"the flags of sglang {doors.version(ENGINE)} are not known: {error}")
        return False


def tracked() -> bool:
    """Tell whether the prefix cache may ask for states inside prompts; True if that is not known."""
    try:
        return bool(_flags().enable_mamba_extra_buffer)
    except (ImportError, AttributeError):
        return True


TRACKED = "the prefix cache asks for states inside prompts; --mamba-radix-cache-strategy no_buffer does not"


def dispatch(door: Door, build: Any, dispatcher: Any, *args: Any, **kw: Any) -> None:
    """Build a dispatcher of SGLang; where refold is asked for, its kernel takes the place of SGLang's.

    Raises:
        BackendUnsupported: refold is asked for, and this version of SGLang has another dispatcher or other kernels.
    """
    asked = [phase for phase in PHASES if wanted(phase)]
    if not asked:
        build(dispatcher, *args, **kw)
        return
    ours = kernel(door)
    try:
        bound = inspect.signature(build).bind(dispatcher, *args, **kw)
        for phase, name in (("decode", "decode_backend"), ("extend", "prefill_backend")):
            backend = bound.arguments[name]
            if phase in asked and backend.is_custom():
                bound.arguments[name] = type(backend).TRITON
    except (KeyError, TypeError, AttributeError) as error:
        raise _refused(door, f"another dispatcher: {error!r}") from error
    build(*bound.args, **bound.kwargs)
    for phase in asked:
        if not hasattr(dispatcher, f"{phase}_kernel"):
            raise _refused(door, f"a dispatcher without {phase}_kernel")
        setattr(dispatcher, f"{phase}_kernel", ours)
        _said(phase, door.layers, door.adapters[phase])
    if "decode" in asked:
        dispatcher.supports_packed_decode = False


def _refused(door: Door, why: str) -> BackendUnsupported:
    return BackendUnsupported(
        f"--linear-attn-backend refold: for {door.layers} layers, sglang {doors.version(ENGINE)} has {why}. "
        "Use another backend, or a newer refold."
    )


@functools.cache
def _said(phase: str, layers: str, adapter: str) -> None:
    doors.log(ENGINE).info("refold: %s of %s layers is refold.engines.adapters.%s", phase, layers, adapter)


def kernel(door: Door) -> Any:
    """Return a kernel of SGLang of which decode and extend are computed by refold.

    Raises:
        BackendUnsupported: A method of this version of SGLang has parameters that refold does not know.
    """
    from refold.engines import adapters

    module, name = door.kernels
    try:
        base = getattr(importlib.import_module(module), name)
        found = {phase: getattr(base, phase) for phase in PHASES}
    except (ImportError, AttributeError) as error:
        raise _refused(door, f"other kernels: {error}") from error
    for phase, theirs in found.items():
        if (why := doors.differs(theirs, getattr(adapters, door.adapters[phase]))) is not None:
            raise _refused(door, f"{phase} with {why}")

    class RefoldKernel(base):  # type: ignore[misc, valid-type]
        supports_packed_decode = False

        def decode(self, *args: Any, **kw: Any) -> Any:
            ours = functools.partial(_known, getattr(adapters, door.adapters["decode"]))
            return doors.either(ENGINE, "decode", ours, super().decode, *args, **kw)

        def extend(self, *args: Any, **kw: Any) -> Any:
            ours = functools.partial(_known, getattr(adapters, door.adapters["extend"]))
            return doors.either(ENGINE, "extend", functools.partial(_extended, door, ours), super().extend, *args, **kw)

    return RefoldKernel()


IGNORED = {
    "state_checkpoint_cu_starts", "num_state_checkpoints", "state_checkpoint_every_n_tokens", "output", "layer_id",
    "extend_prefix_lens", "extend_seq_lens_cpu", "is_spec_decode", "track_ssm_h_src", "track_ssm_h_batch_src",
    "state_checkpoint_indices", "chunk_indices", "chunk_offsets",
}  # fmt: skip
"""What SGLang hands to all kernels, and what its Triton kernels do not read or only launch by."""


def _known(adapter: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Call an adapter, without what is ignored or None; refuse what it does not know."""
    kw = {name: value for name, value in kw.items() if name not in IGNORED and value is not None}
    if new := kw.keys() - inspect.signature(adapter).parameters:
        raise BackendUnsupported(f"{', '.join(sorted(new))} is not computed here")
    return adapter(*args, **kw)


def _extended(door: Door, ours: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Give SGLang the results of a prefill: outputs; for gated DeltaNet layers, two kinds of states after them."""
    if door is not DOORS[0]:
        return ours(*args, **kw)
    if tracked():
        raise BackendUnsupported(TRACKED)
    return ours(*args, **kw), None, None


def mamba(phase: str, theirs: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Call the adapter of a phase of Mamba layers if refold is asked for, else SGLang's function.

    Raises:
        BackendUnsupported: refold is asked for, and the function has parameters that refold does not know.
    """
    if not wanted(phase):
        return theirs(*args, **kw)
    from refold.engines import adapters

    target, adapter = MAMBA[phase]
    ours = getattr(adapters, adapter)
    if (why := _mamba_differs(theirs, ours)) is not None:
        raise BackendUnsupported(
            f"--linear-attn-backend refold: {target.rpartition('.')[2]} of sglang {doors.version(ENGINE)} has {why}. "
            "Use another backend, or a newer refold."
        )
    if phase == "extend":
        if tracked():
            doors.kept(ENGINE, "extend", TRACKED)
            return theirs(*args, **kw)
        _said(phase, "Mamba-2", adapter)
        return doors.either(ENGINE, phase, ours, theirs, *args, **kw)
    backend, *rest = args
    if getattr(backend, "_enable_stochastic_rounding", True):
        doors.kept(ENGINE, phase, "states are rounded at random, or that is not known")
        return theirs(*args, **kw)
    _said(phase, "Mamba", adapter)
    return doors.either(ENGINE, phase, ours, functools.partial(theirs, backend), *rest, **kw)


_mamba_differs = functools.cache(doors.differs)
