"""The plugin for SGLang (`sglang.srt.plugins`): the backend ``refold`` of linear attention, for gated DeltaNet layers.

It adds the name to the choices, and hooks the dispatcher that picks a kernel, both by SGLang's own registries.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from typing import Any, NoReturn

from refold.engines import doors
from refold.errors import BackendUnsupported

ENGINE, NAME = "sglang", "refold"
KERNELS = "sglang.srt.layers.attention.linear.kernels.gdn_triton"
DISPATCHER = "sglang.srt.layers.attention.linear.gdn_backend.GDNKernelDispatcher.__init__"
PARTS = {"decode": "gated_delta_decode", "extend": "gated_delta_extend"}
"""The adapter by method of a kernel. Verification of drafts stays with SGLang's kernel."""


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
        hooks.HookRegistry.register(DISPATCHER, dispatch, hooks.HookType.AROUND)
        choices.add_linear_attn_kernel_backend_choices([NAME])
    except (ImportError, AttributeError) as error:
        log.warning("refold: there is no backend refold in sglang %s: %s", version, error)
    else:
        log.info("refold: sglang %s has the backend refold (--linear-attn-backend refold)", version)


def dispatch(build: Any, dispatcher: Any, decode_backend: Any, prefill_backend: Any, *rest: Any, **kw: Any) -> None:
    """Build a dispatcher of SGLang; where refold is asked for, its kernel takes the place of SGLang's."""
    mamba = importlib.import_module("sglang.srt.runtime_context").get_exec().mamba
    asked = {
        part: backend.is_custom() and (chosen or mamba.linear_attn_backend) == NAME
        for part, backend, chosen in (
            ("decode", decode_backend, mamba.linear_attn_decode_backend),
            ("extend", prefill_backend, mamba.linear_attn_prefill_backend),
        )
    }
    ours = kernel() if any(asked.values()) else None
    triton = type(decode_backend).TRITON
    decode_backend = triton if asked["decode"] else decode_backend
    prefill_backend = triton if asked["extend"] else prefill_backend
    build(dispatcher, decode_backend, prefill_backend, *rest, **kw)
    for part in (part for part, wanted in asked.items() if wanted):
        setattr(dispatcher, f"{part}_kernel", ours)
        doors.log(ENGINE).info("refold: %s of gated DeltaNet layers is refold.engines.adapters.%s", part, PARTS[part])
    if asked["decode"]:
        dispatcher.supports_packed_decode = False


def kernel() -> Any:
    """Return a kernel of SGLang of which decode and extend are computed by refold.

    Raises:
        BackendUnsupported: A method of this version of SGLang has parameters that refold does not know.
    """
    from refold.engines import adapters

    base = importlib.import_module(KERNELS).TritonGDNKernel
    for part, adapter in PARTS.items():
        if (why := doors.differs(getattr(base, part), getattr(adapters, adapter))) is not None:
            raise BackendUnsupported(
                f"--linear-attn-backend refold: {part} of sglang {doors.version(ENGINE)} has {why}. "
                "Use another backend, or a newer refold."
            )

    class RefoldGDNKernel(base):  # type: ignore[misc, valid-type]
        supports_packed_decode = False

        def decode(self, *args: Any, **kw: Any) -> Any:
            ours = functools.partial(_known, adapters.gated_delta_decode)
            return doors.either(ENGINE, "decode", ours, super().decode, *args, **kw)

        def extend(self, *args: Any, **kw: Any) -> Any:
            ours = functools.partial(_known, adapters.gated_delta_extend)
            o = doors.either(ENGINE, "extend", ours, super().extend, *args, **kw)
            return o if isinstance(o, tuple) else (o, None, NoStates())

    return RefoldGDNKernel()


IGNORED = {
    "state_checkpoint_cu_starts", "num_state_checkpoints", "state_checkpoint_every_n_tokens", "output", "layer_id",
    "extend_prefix_lens",
}  # fmt: skip
"""What SGLang hands to all kernels, and what its Triton kernel does not read."""


def _known(adapter: Any, *args: Any, **kw: Any) -> Any:
    """Call an adapter, without what is ignored or None; refuse what it does not know."""
    kw = {name: value for name, value in kw.items() if name not in IGNORED and value is not None}
    if new := kw.keys() - inspect.signature(adapter).parameters:
        raise BackendUnsupported(f"{', '.join(sorted(new))} is not computed here")
    return adapter(*args, **kw)


class NoStates:
    """Stands for the states after chunks, which are not computed; says so when they are read."""

    def __getattr__(self, name: str) -> NoReturn:
        raise BackendUnsupported(
            "The prefix cache asks for states inside prompts, which refold does not compute. Start SGLang with "
            "--linear-attn-prefill-backend triton."
        )
