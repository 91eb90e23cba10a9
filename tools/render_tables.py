"""Render the tables of README.md and docs from stored results; ``--check`` fails if they are stale.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``, a number of a sentence after ``<!-- value: NAME
-->``. Results are JSON lines in ``benchmarks/results/MACHINE/SUITE.jsonl``, which ``refold bench store`` writes; the
tables quote nothing else. Below each table stands where its rows come from, and how many of them are older than the
code that they measure: ``--check`` does not ask for that mark, since each commit may change it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from refold.bench import scale_model
from refold.bench.plots import GPU, device, granite_rows, published_rows, standing
from refold.bench.published import COUNTED
from refold.bench.published import RESULTS as RESULTS_PUBLISHED
from refold.bench.rows import LIMITS, Row, by_program, everywhere, machine, machines, measured, place, rounded, stored
from refold.bench.suites import SUITES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
H100 = "nvidia-h100-80gb-hbm3"
CPU = "intel-xeon-2-threads"
AMD = "amd-epyc-2-threads"
# What refold is to reach: milliseconds, or as an integer percent of the measured limit.
AIMS: dict[str, float | int] = {
    "2.7B decode batch 1": 1.9, "2.7B decode batch 16": 2.9, "130M decode batch 1": 0.45, "2.7B prefill 8192": 55,
}  # fmt: skip

# What a layer is run by, in the order of columns.
SPELLINGS = ("eager", "torch.compile", "mamba_ssm", "refold.ops", "refold")

Columns = dict[str, Callable[[Row], str]]


def table(rows: list[Row], columns: Columns) -> str:
    """Return a table with a line per row, and below it where the rows come from."""
    if not rows:
        return "No row is stored yet."
    used = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    used = {name: cells for name, cells in used.items() if any(cell != "-" for cell in cells)}
    lines = [f"| {' | '.join(used)} |", "|" + "---|" * len(used)]
    lines += [f"| {' | '.join(cells)} |" for cells in zip(*used.values(), strict=True)]
    return "\n".join([*lines, "", origin(rows)])


def origin(rows: list[Row]) -> str:
    """Return where rows come from: machines, versions, dates, git hashes and files."""

    def each(values: Iterable[str | None]) -> str:
        return ", ".join(sorted({value for value in values if value}))

    dates = sorted({row["date"] for row in rows if "date" in row})
    parts = [
        " and ".join(sorted({device(row) for row in rows})),
        each(_framework(row) for row in rows),
        " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "no date",
        "revisions " + each(row["env"].get("revision") for row in rows),
    ]
    files = dict.fromkeys(place(RESULTS, machine(row), row["suite"]).relative_to(ROOT).as_posix() for row in rows)
    kept = [part for part in parts if part and part != "revisions "]
    return f"<small>{'; '.join(kept)}. Rows: {', '.join(f'`{file}`' for file in files)}.{older(rows)}</small>"


def older(rows: list[Row]) -> str:
    """Return how many of the rows are older than the code that they measure; nothing if none is, or without git."""
    when = [changed for row in rows if (changed := changed_after(*_code(row)))]
    if not when:
        return ""
    return f" **{len(when)} of {len(rows)} rows are older than the code that they measure, changed on {max(when)}.**"


MARK = re.compile(r" \*\*\d+ of \d+ rows are older than [^<*]*\*\*")


def _code(row: Row) -> tuple[str, str, tuple[str, ...]]:
    """Return the revision and the date of a row, and the folders that hold the code that it measures."""
    rooms = SUITES[row["suite"]].measures or (f"ops/{row['op'].rstrip('_')}",)
    folders = tuple(f"src/refold/{room}" for room in rooms)
    return row["env"].get("revision", "unknown").removesuffix("-dirty"), row.get("date", ""), folders


@cache
def changed_after(revision: str, date: str, folders: tuple[str, ...]) -> str:
    """Return the day of the last change of folders after a revision, or after a day if it is unknown; else nothing."""
    try:
        if revision != "unknown":
            return git("log", "-1", "--format=%cs", f"{revision}..HEAD", "--", *folders)
    except subprocess.CalledProcessError:
        pass  # the revision of another history
    try:
        last = git("log", "-1", "--format=%cs", "--", *folders)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return last if last > date else ""


def git(*arguments: str) -> str:
    """Ask git about the repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _framework(row: Row) -> str | None:
    name = "jax" if row.get("backend") == "jax" else "torch"
    version = row["env"].get(name)
    return f"{name} {version.partition('+')[0]}" if version else None


def key(name: str) -> Callable[[Row], str]:
    """Return a column that shows a field of the row."""
    return lambda row: str(row.get(name, "-"))


def time(*names: str, shown: tuple[str, ...] = ()) -> Callable[[Row], str]:
    """Return a column that shows the time of a program, or why there is none.

    Args:
        names: The names that the program has in rows.
        shown: The programs of the table; all of the row by default. The time of the fastest one is bold.
    """

    def cell(row: Row) -> str:
        reasons = row["not_run"] if isinstance(row.get("not_run"), dict) else {}
        known = {**by_program(row), **reasons}
        name = next((name for name in names if name in known), "")
        value = known.get(name)
        programs = shown or known.keys() - set(LIMITS)
        timed = [known[program] for program in programs if isinstance(known.get(program), float)]
        fastest = name in programs and len(timed) > 1 and value == min(timed)
        return f"**{_ms(value)}**" if fastest else _ms(value)

    return cell


def _ms(value: float | str | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        if re.match(r"\w+Error\b", value):
            return "fails"
        return value.partition(":")[0] if value.startswith(("not run", "an error")) else "not run"
    return f"{rounded(value)}\u00a0ms"  # one word: cells do not break it


def times(*names: str) -> Columns:
    """Return a column for the time of each program, with its name in rows."""
    return {name.replace("_", "-"): time(name) for name in names}


def seconds(name: str) -> Callable[[Row], str]:
    """Return a column that shows a field in seconds."""
    return lambda row: f"{row[name]:.1f} s"


def sizes(row: Row) -> str:
    """Say how many rows of how many tokens were computed."""
    return f"{row['batch']} x {row['tokens']}"


def card(row: Row) -> str:
    """Return the short name of a row's GPU."""
    return device(row).removeprefix("NVIDIA ").partition(" 80GB")[0]


def program(row: Row) -> str:
    """Return the program of a row of generation."""
    return {"torch": "refold", "jax": "refold"}.get(row["backend"], row["backend"]).replace("torch,", "refold,")


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _cpus() -> list[str]:
    return [name for name in machines(RESULTS) if name.endswith(("-thread", "-threads"))]


# Tables -----------------------------------------------------------------------------------------


def granite_layer() -> str:
    """Return the table of the Granite hybrid layer: one row a machine, release, dtype and size."""

    def peaks(row: Row) -> str:
        return " -> ".join(_size(row["peak_bytes"][name]) for name in ("eager", "refold"))

    shown = ("eager", "torch.compile", "refold")

    def compiled(row: Row) -> str:
        return time("torch.compile", shown=shown)({**row, "not_run": {}}).replace("-", "fails (torch 2.11)")

    return table(granite_rows(RESULTS), {
        "machine, dtype, batch x tokens": lambda row: f"{device(row)}, {row['dtype']}, {sizes(row)}",
        "transformers": key("transformers"),
        "eager": time("eager", shown=shown),
        "torch.compile": compiled,
        "refold": time("refold", shown=shown),
        "peak, eager -> refold": peaks,
    }).partition("\n\n")[0]  # fmt: skip


def granite_programs() -> str:
    """Return the table of all programs of the Granite layer, and of its product that is summed: times and kernels."""

    def counted(name: str) -> Callable[[Row], str]:
        def cell(row: Row) -> str:
            count = row["kernels"].get(name) if name in row["times_ms"] else None
            return time(name)(row) + ("" if count is None else f", {count} kernel{'s' * (count != 1)}")

        return cell

    return table([row for row in everywhere(RESULTS, "granite-layer", folders=(GPU, *_cpus())) if "kernels" in row], {
        "what": lambda row: f"{row['case']}, {row['dtype']}, {sizes(row)}, {device(row)}",
        **{name.replace("_", "-"): counted(name) for name in SPELLINGS},
    })  # fmt: skip


def ssd(suite: str) -> Callable[[], str]:
    """Make a renderer of the table of the operator ssd: times, and how near results are to float64."""

    def of(what: str) -> Callable[[Row], str]:
        def cell(row: Row) -> str:
            found = [row.get("accuracy", {}).get(name, {}).get(what) for name in ("refold", "mamba_ssm", "fused")]
            return ", ".join(f"{100 * share:.2f} %" for share in found if share is not None) or "-"

        return cell

    return lambda: table(everywhere(RESULTS, suite), {
        "batch x tokens x heads, channels x states": key("case"),
        "card": card,
        "refold": time("refold"),
        "mamba-ssm": time("mamba-ssm"),
        "published fused kernel": time("fused"),
        "copy of its bytes": time("copy"),
        "errors": of("error"),
        "within 0.1 %": of("within_1e-3"),
        "within 1 %": of("within_1e-2"),
    })  # fmt: skip


def delta_rule() -> str:
    """Return the table of the delta rule, forward and with gradients, next to fla."""
    return table(everywhere(RESULTS, "delta-rule", "delta-rule-backward"), {
        "layer, batch x tokens, heads of keys/values": key("case"),
        "pass": lambda row: "with gradients" if row.get("pass") else "forward",
        "card": card,
        "refold": lambda row: time("refold, both" if row.get("pass") else "refold")(row),
        "fla": lambda row: time("fla, both" if row.get("pass") else "fla")(row),
    })  # fmt: skip


def published_case(row: Row) -> str:
    """Say what a row of published results was measured on."""
    return f"{row['case']}, {row['dtype']}" + (f", batch {row['batch']}" if "batch" in row else "")


def published(result: str) -> Callable[[], str]:
    """Make a renderer of the table of a published result: its program, ours, the ratio and errors against float64."""

    def fastest(row: Row) -> str:
        others = {
            name: ms for name, ms in row["times_ms"].items() if not name.startswith("refold") and name not in LIMITS
        }
        if not others:
            return "-"
        name = min(others, key=lambda name: others[name])
        return f"{name.replace('_', '-')}, {_ms(others[name])}: {row['of_fastest']:.2f}x"

    def error(row: Row) -> str:
        names = {row["ours"]: "refold", row["rival"]: "published"}
        found = {names.get(name, ""): value for name, value in row["errors"].items()}
        return ", ".join(f"{found[name]:.1e}" if name in found else "-" for name in ("refold", "published"))

    def rows() -> list[Row]:
        return [row for row in published_rows(RESULTS) if row["result"] == result]

    return lambda: table(rows(), {
        "what": published_case,
        "device": device,
        "eager": time("eager"),
        "published program": lambda row: f"{row['rival'].replace('_', '-')}: {time(row['rival'])(row)}",
        "refold": lambda row: time(row["ours"])(row),
        "published / refold": lambda row: f"**{row['ratio']:.2f}x**" if row["ratio"] else "-",
        "the fastest other, over refold": fastest,
        "errors: refold, published": error,
        "longest kernel of the published": lambda row: f"`{(row.get('longest') or {}).get(row['rival'], '-')[:48]}`",
    }) + not_run(rows())  # fmt: skip


def published_figure() -> str:
    """Return the figure of published results, once rows are stored."""
    return (
        "![Times of published programs and of refold](figures/published.svg)"
        if published_rows(RESULTS)
        else table([], {})
    )


def not_run(rows: list[Row]) -> str:
    """Return a line that says which programs did not run, and why."""
    reasons = {f"{name.replace('_', '-')} on {device(row)}: {why.removeprefix('not run: ')}"
               for row in rows for name, why in row["not_run"].items()}  # fmt: skip
    return f"\n\nNot run: {'; '.join(sorted(reasons))}." if reasons else ""


def published_counts() -> str:
    """Return the table of what published results count: launches, equal tokens, shares of elements."""

    def count(*names: str) -> Callable[[Row], str]:
        def cell(row: Row) -> str:
            found = [row["counts"][name] for name in names if name in row["counts"]]
            return "-" if not found else f"{100 * found[0]:.2f} %" if isinstance(found[0], float) else f"{found[0]:,}"

        return cell

    return table([row for row in everywhere(RESULTS, "published") if "counts" in row], {
        "what": published_case,
        "device": device,
        "counted": key("what"),
        "eager": count("eager"),
        "published program": count("published CUDA", "published rewrite", "mamba2-jax", "fused"),
        "mamba-ssm": count("mamba_ssm"),
        "refold": count("refold"),
    })  # fmt: skip


def pointwise() -> str:
    """Return the table of the other operators and of the steps, forward and backward."""
    return table(stored(RESULTS, GPU, "pointwise", "pointwise-backward"), {
        "operator": lambda row: f"`{row['op']}`",
        "pass": lambda row: row.get("pass", "forward"),
        "sizes": key("case"),
        "time": time("refold"),
        "in a CUDA graph": time("graph"),
        "rate, of a copy's": lambda row: f"{100 * row['share_of_copy']:.0f} %",
    })  # fmt: skip


def training() -> str:
    """Return the table of layers in training."""
    return table(stored(RESULTS, GPU, "training"), {
        "layer": key("case"), "width": key("width"), "batch x tokens": sizes, "dtype": key("dtype"),
        **times(*SPELLINGS),
        "peaks of these": lambda row: ", ".join(_size(row["peak_bytes"][name]) for name in SPELLINGS[2:]),
    })  # fmt: skip


def linear_attention() -> str:
    """Return the table of linear attention."""
    rows = stored(RESULTS, GPU, "linear-attention")
    cases = list(dict.fromkeys(row["case"] for row in rows))
    rows.sort(key=lambda row: (row["pass"], cases.index(row["case"]), row["batch"], row["tokens"]))
    return table(rows, {
        "kind": key("case"), "pass": key("pass"), "batch x tokens": sizes, "dtype": key("dtype"),
        **times("eager", "torch.compile", "fla", "refold.ops", "refold"),
    })  # fmt: skip


def kernelbench() -> str:
    """Return the table of the problems of KernelBench that were timed, and how many there are of the others."""
    rows = stored(RESULTS, GPU, "kernelbench")
    timed = sorted((row for row in rows if row.get("times_ms")), key=lambda row: -(row["ratio"] or 0))
    failed = [f"{row['example']} ({row['failed']})" for row in rows if "failed" in row]
    nothing = len(rows) - len(timed) - len(failed)
    said = [f"Of {len(rows)} problems that are stored, {len(timed)} were timed. In {nothing} others nothing is found."]
    said += [f"Not finished: {', '.join(failed)}."] if failed else []
    return " ".join(said) + "\n\n" + table(timed, {
        "problem": lambda row: f"{row['example']} {row['file'].partition('_')[2].removesuffix('.py').rstrip('_')}",
        **times("eager", "torch.compile", "refold"),
        "the faster of both, over refold": lambda row: f"{row['ratio']:.2f}x" if row["ratio"] else "-",
        "runs": lambda row: ", ".join(row["chosen"]).replace("inductor", "torch.compile"),
        "right": lambda row: "no" if "refused" in row else "yes",
    })  # fmt: skip


def recurrences(folder: str) -> Callable[[], str]:
    """Make a renderer of the table of recurrences: a line per recurrence, a column per pass and number of steps."""

    def gain(row: Row) -> str:
        times = row.get("times_ms", {})
        rivals = [ms for name, ms in times.items() if name != "refold"]
        if not rivals:
            return "wrong"
        alone = "" if "torch.compile" in times else "*"
        ratio = min(rivals) / times["refold"]
        return (f"{ratio:.0f}x" if ratio >= 9.95 else f"{ratio:#.2g}x") + alone

    def render() -> str:
        rows = stored(RESULTS, folder, "recurrences")
        if not rows:
            return table(rows, {})
        kinds = sorted({(row["pass"] != "forward", row["steps"]) for row in rows})
        found = {(row["case"], row["pass"] != "forward", row["steps"]): gain(row) for row in rows}
        names = [f"{steps}{', gradients' if grad else ''}" for grad, steps in kinds]
        lines = [f"| steps | {' | '.join(names)} |", "|---|" + "---|" * len(kinds)]
        for case in sorted({row["case"] for row in rows}):
            lines.append(f"| {case} | {' | '.join(found.get((case, *kind), '-') for kind in kinds)} |")
        return "\n".join([*lines, "", origin(rows)])

    return render


def models(folders: Callable[[], list[str]]) -> Callable[[], str]:
    """Make a renderer of the table of transformers' models: the fastest turns, and compiled over accelerated."""

    def best(name: str) -> Callable[[Row], str]:
        shown = time(name)
        return lambda row: shown({**row, "times_ms": row.get("best_ms", {})})

    def ratio(row: Row) -> str:
        ms = row.get("best_ms", {})
        return f"{ms['refold'] / ms['accelerated']:.2f}x" if {"refold", "accelerated"} <= ms.keys() else "-"

    return lambda: table(everywhere(RESULTS, "models", folders=folders()), {
        "model": key("case"),
        "width, tokens, dtype": lambda row: f"{row['width']}, {sizes(row)}, {row['dtype']}",
        "eager": best("eager"),
        "torch.compile": best("torch.compile"),
        "accelerated": best("accelerated"),
        "accelerated and compiled": best("accelerated, refold"),
        "compiled": best("refold"),
        "compiled, of accelerated": ratio,
    })  # fmt: skip


def cpu() -> str:
    """Return the table of the suite cpu, of the machine that it was measured on last."""
    found = [rows for folder in _cpus() if (rows := stored(RESULTS, folder, "cpu"))]
    rows = max(found, key=lambda rows: max(row["date"] for row in rows), default=[])
    pairs: dict[str, Row] = {}
    for row in rows:
        if "backend" in row:  # generation: a row per program
            row = {**row, "times_ms": {row["backend"].replace("torch", "refold"): 1e3 * row["median_s"]}}
        if "first_call_s" in row and "times_ms" not in row:
            first = {"refold": 1e3 * row["first_call_s"]}
            row = {**row, "case": f"first call, loop of {row['case']}", "times_ms": first}
        if "steps" in row and "pass" in row:
            row = {**row, "case": f"{row['case']}, {row['steps']} steps"}
        times = {**pairs.get(row["case"], row)["times_ms"], **row["times_ms"]}
        pairs[row["case"]] = {**row, "times_ms": times}

    def others(row: Row) -> str:
        return "; ".join(f"{name}: {_ms(ms)}" for name, ms in row["times_ms"].items() if name != "refold") or "-"

    return table(list(pairs.values()), {"what": key("case"), "refold": time("refold"), "others": others})


def compile_time() -> str:
    """Return the table of first calls."""
    graphs = [{**row["report"]["graphs"][0], **row} for row in stored(RESULTS, CPU, "compile-time")]
    return table([{"checks_s": row.get("proof_s"), **row} for row in graphs], {
        "layers x steps": key("case"), "first call": seconds("first_call_s"), "compile": seconds("compile_s"),
        "checks and timing": seconds("checks_s"),
    })  # fmt: skip


def generation(*suites: str) -> Callable[[], str]:
    """Make a renderer of the table of decoding or prefill: a line per program."""

    def least(row: Row) -> float:
        return 1e3 * max(row["bytes"] / row["ceiling_gb_per_s"] / 1e9, row["flops"] / row["ceiling_tflop_per_s"] / 1e12)

    def share(row: Row) -> str:
        if not measured(row):
            return "-"
        matrix = row["flops"] / row["ceiling_tflop_per_s"] / 1e12 > row["bytes"] / row["ceiling_gb_per_s"] / 1e9
        return f"{100 * least(row) / 1e3 / row['median_s']:.0f} % of the {'matrix rate' if matrix else 'bandwidth'}"

    def aim(row: Row) -> str:
        model = row["case"].partition(" past ")[0]
        if model not in AIMS or row["backend"] not in ("torch", "torch, bfloat16"):
            return "-"
        most = AIMS[model] if isinstance(AIMS[model], float) else 100 * least(row) / int(AIMS[model])
        over = 1e3 * row["median_s"] / most - 1
        return f"{most:.3g}\u00a0ms: {f'missed by {100 * over:.0f} %' if over > 0 else 'met'}"

    return lambda: table(sorted(stored(RESULTS, GPU, *suites), key=standing), {
        "what": key("case"),
        "program": program,
        "time": lambda row: _ms(1e3 * row["median_s"]) if measured(row) else "not run",
        "least": lambda row: _ms(least(row)) if measured(row) else "-",
        "share": share,
        "aim": aim,
        "memory": lambda row: _size(int(2**30 * row["extra_gib"])) if row.get("extra_gib", 0) > 2**-10 else "-",
    })  # fmt: skip


def generate_rows(gpus: Iterable[str]) -> list[Row]:
    """Return the rows of accelerated models; ``seconds`` are those of all programs, None where memory was too small."""
    rows, found = everywhere(RESULTS, "generate", folders=gpus), dict[tuple[str, str], dict[str, float | None]]()
    for row in rows:
        found.setdefault((card(row), row["case"]), {})[row["backend"]] = row["median_s"] if measured(row) else None
    return [{**row, "seconds": found[card(row), row["case"]]} for row in rows if row["backend"] == "accelerated"]


def generate_time(name: str) -> Callable[[Row], str]:
    """Return a column that shows the time of a program that generates."""

    def cell(row: Row) -> str:
        if name not in row["seconds"]:
            return "-"
        return "out of memory" if row["seconds"][name] is None else _ms(1e3 * row["seconds"][name])

    return cell


def generate_gain(row: Row) -> str:
    """Say how many times as fast the accelerated model generates; a dash where one of both was not measured."""
    unmodified, accelerated = (row["seconds"].get(name) for name in ("transformers", "accelerated"))
    return f"{unmodified / accelerated:.0f}x" if unmodified and accelerated else "-"


GENERATE: Columns = {
    "model": lambda row: row["case"].partition(" ")[0],
    "rows": lambda row: row["case"].split()[3],
    "card": card,
    "unmodified": generate_time("transformers"),
    "accelerated, `graphs=False`": generate_time("accelerated, no graphs"),
    "accelerated": lambda row: f"**{generate_time('accelerated')(row)}**",
    "lean model": generate_time("lean"),
    "the loop alone": generate_time("a model that does nothing"),
    "faster": generate_gain,
}


def generate(gpus: Iterable[str], *columns: str) -> Callable[[], str]:
    """Make a renderer of ``model.generate``: a line per card, model and number of rows, a column per program."""
    return lambda: table(generate_rows(gpus), {name: GENERATE[name] for name in columns})


def starts() -> str:
    """Return the table of first calls on a GPU: a line per operator and dtype and pass."""
    return table(stored(RESULTS, GPU, "starts"), {
        "operator": key("case"), "pass": key("pass"), "empty caches": seconds("empty_s"),
        "a second process": seconds("full_s"), "kernels": key("kernels"),
    })  # fmt: skip


def engines() -> str:
    """Return the table of calls of serving engines: a line per layer, phase and size, a column per program."""
    return table(stored(RESULTS, H100, "engines"), {
        "layer, phase": key("case"),
        "rows x tokens": sizes,
        "refold": time("refold"),
        "refold, SGLang's call": time("refold, sglang"),
        "vLLM's Triton": time("vllm"),
        "SGLang's Triton": time("sglang"),
    })  # fmt: skip


def scale(gpu: str) -> Callable[[], str]:
    """Make a renderer of the table of sequences that GPUs share: a line per pass and tokens of a rank."""

    def draw() -> str:
        rows = scale_model.rows(RESULTS, gpu)
        found: dict[tuple[Any, ...], Row] = {}
        for way in ("", "all-to-all"):
            for each in scale_model.shared(rows, way):
                line = found.setdefault((each.op, each.kind, each.tokens), {**each.row, "each": each})
                line.setdefault(way, {})[each.ranks] = each
        counts = sorted({ranks for line in found.values() for ranks in line[""]})

        def over(
            value: Callable[[scale_model.SharedCall], float | None], form: str, way: str = ""
        ) -> Callable[[Row], str]:
            def cell(line: Row) -> str:
                told = [value(line[way][ranks]) if ranks in line.get(way, {}) else None for ranks in counts]
                return " / ".join("-" if one is None else format(one, form) for one in told)

            return lambda line: "-" if set(cell(line)) <= set("- /") else cell(line)

        return table(list(found.values()), {
            "operator or model": key("op"), "pass": key("pass"),
            "tokens of a rank": lambda line: f"{line['each'].tokens:,}",
            "one GPU": lambda line: "-" if line["each"].alone is None else _ms(1e3 * line["each"].alone),
            " / ".join(map(str, counts)) + " GPUs, ms": over(lambda each: 1e3 * each.seconds, ",.4g"),
            "weak": over(lambda each: each.weak, ".0%"), "strong": over(lambda each: each.strong, ".0%"),
            "all-to-all, ms": over(lambda each: 1e3 * each.seconds, ",.4g", "all-to-all"),
            "sent, MB": over(lambda each: each.row["sent_bytes"] / 1e6, ",.1f"),
        })  # fmt: skip

    return draw


def scale_fit() -> str:
    """Return the table of the model of time: what was fitted, and its largest error where the GPU tells the time."""
    lines = []
    for calls in scale_model.groups(scale_model.rows(RESULTS, GPU)):
        fitted = scale_model.fit(calls)
        wrong = {True: 0.0, False: 0.0}
        for each in calls:
            if each.alone is not None:
                off = abs(fitted.seconds(each.alone, each.ranks) / each.seconds - 1)
                wrong[each.long] = max(wrong[each.long], off)
        lines.append({**calls[0].row, "fit": fitted, "long": wrong[True], "short": wrong[False]})

    def part(name: str, unit: float, text: str) -> Callable[[Row], str]:
        return lambda row: format(getattr(row["fit"], name) * unit, text)

    return table(lines, {
        "operator or model": key("op"), "pass": key("pass"),
        "s": part("share", 1, ".1%"), "E, ms": part("call", 1e3, ".2f"),
        "g, ms": part("rank", 1e3, ".3f"), "H, ms": part("host", 1e3, ".1f"),
        "largest error, long": lambda row: f"{row['long']:.1%}", "short": lambda row: f"{row['short']:.1%}",
    })  # fmt: skip


def scale_paper() -> str:
    """Return the table of forward of ssd over many ranks of different hosts, on paper."""
    found = scale_model.groups(scale_model.rows(RESULTS, GPU))
    (calls,) = (calls for calls in found if (calls[0].op, calls[0].kind) == ("ssd", "forward"))
    lines = []
    for ranks in (2, 16, 128, 1024):
        took, efficiency = scale_model.on_paper(calls, 131072, ranks)
        lines.append({**calls[0].row, "ranks": ranks, "took": took, "efficiency": efficiency})
    return table(lines, {
        "ranks": key("ranks"), "tokens": lambda row: f"{131072 * row['ranks']:,}",
        "forward": lambda row: f"{1e3 * row['took']:.1f} ms", "efficiency": lambda row: f"{row['efficiency']:.0%}",
    })  # fmt: skip


def in_turns(suite: str) -> Callable[[], str]:
    """Make a renderer of the table of generation on a CPU: a line per program and machine."""
    return lambda: table(everywhere(RESULTS, suite, folders=_cpus()), {
        "machine": device, "what": key("case"), "program": program, "time": lambda row: _ms(1e3 * row["median_s"]),
    })  # fmt: skip


def ssd_jax() -> str:
    """Return the table of ssd on JAX."""
    return table(stored(RESULTS, GPU, "ssd-jax"), {
        "batch x tokens x heads, channels x states": key("case"),
        "dtype": key("dtype"),
        "forward": lambda row: _ms(row["forward_ms"]),
        "with all gradients": lambda row: _ms(row["both_ms"]),
    })  # fmt: skip


TABLES: dict[str, Callable[[], str]] = {
    "granite_layer": granite_layer, "granite_programs": granite_programs, "ssd": ssd("ssd"),
    "ssd_sizes": ssd("ssd-sizes"), "delta_rule": delta_rule,
    **{f"published_{result.split()[0].lower()}_{result.split()[1].lower()}": published(result)
       for result in RESULTS_PUBLISHED if result != COUNTED},
    "published_counts": published_counts, "published_figure": published_figure,
    "pointwise": pointwise, "training": training, "linear_attention": linear_attention,
    "kernelbench": kernelbench,
    "recurrences": recurrences(CPU), "recurrences_amd": recurrences(AMD),
    "recurrences_gpu": recurrences(GPU), "models": models(_cpus), "models_gpu": models(lambda: [GPU]),
    "cpu": cpu, "compile_time": compile_time, "decode": generation("decode"),
    "prefill": generation("prefill"), "generate": generate((H100, GPU), *[n for n in GENERATE if n != "faster"]),
    "generate_short": generate((GPU,), "model", "rows", "unmodified", "accelerated", "faster"),
    "generation": generation("generation"),
    "ssd_jax": ssd_jax, "scale": scale(GPU), "scale_h100": scale(H100),
    "scale_fit": scale_fit, "scale_paper": scale_paper, "engines": engines, "starts": starts,
    "generation_cpu": in_turns("generation-cpu"), "generation_torch_cpu": in_turns("generation-torch-cpu"),
}  # fmt: skip


def _both(suite: str, field: str, **what: str) -> Callable[[], str]:
    """Make a renderer of a time of the one row of a suite that has these values."""

    def value() -> str:
        (row,) = (row for row in stored(RESULTS, GPU, suite) if what.items() <= row.items())
        return _ms(row[field])

    return value


def _ceiling(suite: str, field: str, scale: float, unit: str) -> Callable[[], str]:
    """Make a renderer of the range of a rate that rows of a suite have."""

    def value() -> str:
        rates = sorted(row[field] / scale for row in stored(RESULTS, GPU, suite) if field in row)
        return (
            " to ".join(dict.fromkeys(f"{rate:.2g}" if rate < 10 else f"{rate:.0f}" for rate in (rates[0], rates[-1])))
            + unit
        )

    return value


def _least_gain() -> str:
    """Return the least gain over another program of all recurrences, on the machine of the last table."""
    rows = [row["times_ms"] for row in stored(RESULTS, AMD, "recurrences") if len(row.get("times_ms", {})) > 1]
    return f"{min(min(ms for name, ms in row.items() if name != 'refold') / row['refold'] for row in rows):.2f}x"


VALUES: dict[str, Callable[[], str]] = {
    "gradients_short": _both("pointwise-backward", "both_ms", case="1x2048x5120"),
    "gradients_jax_peer": _both("ssd-backward", "both_ms", case="8x4096x80"),
    "copy_torch": _ceiling("decode", "ceiling_gb_per_s", 1e3, " TB/s"),
    "copy_jax": _ceiling("generation", "ceiling_gb_per_s", 1e3, " TB/s"),
    "matrix_jax": _ceiling("generation", "ceiling_tflop_per_s", 1, " TFLOP/s"),
    "least_gain": _least_gain,
}
"""Numbers of sentences."""


def render(text: str) -> str:
    """Return a page with its tables and numbers filled in."""
    text = re.sub(
        r"(<!-- value: (\w+) -->)[^<]*(<!-- end -->)", lambda found: found[1] + VALUES[found[2]]() + found[3], text
    )

    def fill(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def main() -> None:
    """Render, or check."""
    stale = []
    for path in PAGES:
        text = path.read_text()
        fresh = render(text)
        if MARK.sub("", fresh) != MARK.sub("", text) or ("--check" not in sys.argv and fresh != text):
            stale.append(path.relative_to(ROOT).as_posix())
            if "--check" not in sys.argv:
                path.write_text(fresh)
    if stale and "--check" in sys.argv:
        sys.exit(f"stale tables in {', '.join(stale)}: run python tools/render_tables.py")


if __name__ == "__main__":
    main()
