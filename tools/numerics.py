"""Measure the errors of the operators against float64, and render docs/numerics.md from what was measured.

python tools/numerics.py measure --backend torch --device cpu    # writes benchmarks/results/numerics/torch-cpu.json
python tools/numerics.py render                                   # writes docs/numerics.md
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

from refold.ops.spec import all_specs, load
from refold.ops.testing import measure, problem

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "numerics"
PAGE = ROOT / "docs" / "numerics.md"
DTYPES = ("float32", "bfloat16", "float16")

CASES = {spec.name: spec.layer for spec in all_specs() if spec.layer is not None}

HEADER = """# Measured errors

Errors of every operator against its float64 definition, at the sizes of a layer, with all options on. An entry is the
largest error of a result or gradient (`d` + argument), divided by its largest true value. Inputs hold only values that
the dtype can represent, so an entry shows the rounding inside the operator and of its results. One rounding of a result
is 6e-8 in float32, 4e-3 in bfloat16, and 5e-4 in float16. States and the gradients of states, `A`, `D` and `dt_bias`
are stored in float32. The Triton kernels of `ssd` multiply 16-bit factors, so its states and gradients have errors of
that size.

This page is generated. To repeat it, run `python tools/numerics.py measure --backend torch`, on a GPU
`python tools/numerics.py measure --backend triton --device cuda`, and then `python tools/numerics.py render`.
"""


def run(backend: str, device: str) -> None:
    """Measure one backend on one device and store it."""
    rows = []
    for op, case in CASES.items():
        for dtype in DTYPES:
            found = measure(problem(load(op), case, dtype), backend, device)
            rows.append({"op": op, "dtype": dtype, "sizes": case.sizes, "errors": {m.name: m.error for m in found}})
            print(op, dtype, *(f"{m.name}={m.error:.1e}" for m in found))
    stored = {"backend": backend, "device": describe(backend, device), "rows": rows}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{backend}-{device}.json").write_text(json.dumps(stored, indent=1) + "\n")


def describe(backend: str, device: str) -> str:
    """Describe what ran: versions and the kind of device."""
    if backend == "jax":
        import jax

        return f"jax {jax.__version__}, {jax.devices()[0].device_kind}"
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return f"torch {torch.__version__}, {name}"


def render() -> str:
    """Return the page from everything stored."""
    parts = [HEADER]
    for path in sorted(RESULTS.glob("*.json")):
        stored = json.loads(path.read_text())
        parts.append(f"\n## {stored['backend']} ({stored['device']})\n")
        for op in CASES:
            rows = [row for row in stored["rows"] if row["op"] == op]
            if rows:
                parts.append(table(op, rows))
    return "".join(parts)


def table(op: str, rows: list[dict[str, Any]]) -> str:
    """Return one operator's errors, a column a dtype."""
    sizes = ", ".join(f"{letter}={size}" for letter, size in rows[0]["sizes"].items())
    lines = [f"\n`{op}` ({sizes})\n", "| | " + " | ".join(row["dtype"] for row in rows) + " |"]
    lines.append("|---|" + "---|" * len(rows))
    lines += [
        f"| {name} | " + " | ".join(f"{row['errors'][name]:.1e}" for row in rows) + " |" for name in rows[0]["errors"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["measure", "render"])
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.action == "measure":
        run(args.backend, args.device)
    else:
        PAGE.write_text(render())


if __name__ == "__main__":
    main()
