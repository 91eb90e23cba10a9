"""The contract of `refold.ops.testing` on the device: every operator, case and dtype through the Triton kernels.

The cases of the specs are small and ragged, so that plain kernels run them. Each is run again with the spec's
`wide_sizes`, which the kernels with hand-made layouts take. An operator without such a kernel needs none.
"""

import dataclasses

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from refold.ops.spec import all_specs  # noqa: E402
from refold.ops.testing import CHECKS, check, problem  # noqa: E402

pytestmark = pytest.mark.gpu
CORE = ("values", "gradients", "no_worse_than_torch", "repeatable_gradients")


def cells(every=1):
    """Yield specs and cases; of the wide ones, one out of ``every`` and all that the small ones do not reach."""
    for spec in all_specs():
        for i, case in enumerate(spec.cases()):
            yield pytest.param(spec, case, id=f"{spec.name}-{case}")
            if not spec.wide_sizes:
                continue
            sizes = {**case.sizes, **spec.wide_sizes}
            wide = dataclasses.replace(case, name=f"wide_{case}", sizes={k: sizes[k] for k in case.sizes})
            if i % every == 0 or case.strided or case.lengths:
                yield pytest.param(spec, wide, id=f"{spec.name}-{wide}")


@pytest.mark.parametrize(("spec", "case"), list(cells()))
def test_float32(spec, case):
    given = problem(spec, case)
    for name in CHECKS:
        check(name, given, "triton", "cuda")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("spec", "case"), list(cells(every=3)))
def test_half_precision(spec, case, dtype):
    given = problem(spec, case, dtype)
    for name in (*CORE, *(["nonfinite"] if spec.name == "ssd" else [])):
        check(name, given, "triton", "cuda")
