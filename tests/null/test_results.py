"""Tables and figures show the results that are stored."""

import json
import re
import subprocess
import sys
from itertools import pairwise

import pytest

from null.source import ROOT, tool
from refold.bench.plots import PLOTS, STYLE


def test_tables_are_not_stale():
    subprocess.run([sys.executable, "tools/render_tables.py", "--check"], cwd=ROOT, check=True, timeout=300)


def test_figures_are_not_stale():
    from refold.bench import plots

    assert plots.stale(ROOT / "benchmarks" / "results", ROOT / "docs" / "figures") == []


def test_figures_have_a_transparent_ground_and_both_themes():
    for path in (ROOT / "docs" / "figures").glob("*.svg"):
        svg = path.read_text()
        assert "prefers-color-scheme: dark" in svg, path.name
        ground = svg.partition('<g id="patch_1">')[2].partition("</g>")[0]
        assert "fill: #" not in ground, path.name


def test_stored_rows_lie_where_they_belong_once_each():
    from refold.bench import rows
    from refold.bench.suites import SUITES

    results = ROOT / "benchmarks" / "results"
    for path in sorted(path for path in results.glob("*/*.jsonl") if path.parent.name != "numerics"):
        found = rows.read(path)
        assert {rows.place(results, rows.machine(row), row["suite"]) for row in found} == {path}
        assert {row["suite"] for row in found} <= SUITES.keys()
        assert len({rows.identity(row) for row in found}) == len(found), f"{path}: use refold bench store"
        assert rows.without_folders(path.read_text()) == path.read_text(), f"{path} names folders of a machine"


def test_a_table_says_how_many_of_its_rows_are_older_than_the_code(monkeypatch):
    render, asked = tool("render_tables"), []

    def git(*arguments):
        asked.append(arguments)
        if "old..HEAD" in arguments:
            return "2026-11-25"
        if "elsewhere..HEAD" in arguments:
            raise subprocess.CalledProcessError(128, "git")
        return "" if "new..HEAD" in arguments else "2026-11-24"

    def row(revision, date="2026-11-23"):
        env = {"revision": revision, "gpu": "NVIDIA H200", "torch": "2.11.0"}
        return {"suite": "ssd", "op": "ssd_", "date": date, "env": env}

    monkeypatch.setattr(render, "git", git)
    rows = [row("old"), row("old-dirty"), row("new"), row("elsewhere"), row("unknown"), row("unknown", "2026-11-24")]
    said = render.origin(rows)
    assert "**4 of 6 rows are older than the code that they measure, changed on 2026-11-25.**" in said
    assert {one[-1] for one in asked} == {"src/refold/ops/ssd"}
    assert render.MARK.sub("", said).endswith("ssd.jsonl`.</small>")
    assert "older" not in render.origin([row("new")])


@pytest.mark.parametrize("unmodified", [{"median_s": 3.0}, {"not_run": "OutOfMemoryError: all of it"}, None])
def test_a_model_that_was_measured_alone_has_no_gain(monkeypatch, unmodified):
    render = tool("render_tables")
    about = {"suite": "generate", "env": {"gpu": "NVIDIA H200"}, "median_s": 1.0}
    rows = [{**about, "backend": name, "case": "130M batch x 8"} for name in ("transformers", "accelerated")]
    alone = {**about, "backend": "accelerated", "case": "130M batch x 1"}
    other = [] if unmodified is None else [{**about, "case": alone["case"], "backend": "transformers"} | unmodified]
    monkeypatch.setattr(render, "everywhere", lambda *_, **__: [*rows, alone, *other])
    monkeypatch.setattr(render, "origin", lambda _: "")
    cells = render.TABLES["generate_short"]().splitlines()[3].split(" | ")
    assert cells[-1] == ("3x |" if unmodified == {"median_s": 3.0} else "- |")


def test_a_number_of_a_sentence_is_drawn_from_rows():
    text = "It takes <!-- value: gradients_short -->0 ms<!-- end --> here."
    rows = (ROOT / "benchmarks/results/nvidia-h200/pointwise_backward.jsonl").read_text().splitlines()
    (ms,) = (row["both_ms"] for row in map(json.loads, rows) if row["op"] == "linear_scan")
    assert tool("render_tables").render(text) == text.replace("0 ms", f"{ms:#.3g}\u00a0ms")


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda p: p.name)
def test_sentences_with_times_and_rates_say_where_they_come_from(page):
    """They are drawn from rows, or their paragraph says that they were measured by hand, or names the log."""
    text = re.sub(r"^```.*?^```$|^<!-- table: .*?^<!-- end -->$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-|]|\d+\.) )", text):
        if re.search(r"\d (?:ms|us|TB/s|TFLOP/s)\b", re.sub(r"<!-- value: .*?<!-- end -->", "", paragraph)):
            assert re.search(r"by hand|LOG\.md|\*\*Published:\*\*", paragraph), paragraph


def test_every_suite_is_shown_somewhere():
    """A figure or a table reads the rows of each suite."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    files = (
        "src/refold/bench/plots.py",
        "src/refold/bench/scale_model.py",
        "tools/render_tables.py",
        "src/refold/bench/published.py",
    )
    shown = "".join((ROOT / file).read_text() for file in files)
    from refold.bench.suites import SUITES

    for name in SUITES:
        assert f'"{name}"' in shown, f"nothing draws or renders the rows of {name}"
        assert f"`{name}`" in page, f"docs/benchmarks.md does not say where the rows of {name} are shown"


def test_a_figure_of_other_rows_is_stale(tmp_path):
    from refold.bench import plots

    figures = tmp_path / "figures"
    figures.mkdir()
    for path in (ROOT / "docs" / "figures").glob("*.svg"):
        (figures / path.name).write_text(path.read_text())
    path = figures / "operators.svg"
    path.write_text(path.read_text().replace("drawn from rows", "drawn from rows 0"))
    assert plots.stale(ROOT / "benchmarks" / "results", figures) == ["operators"]


@pytest.mark.parametrize("name", PLOTS)
def test_numbers_and_names_of_an_axis_do_not_overlap(name):
    pytest.importorskip("matplotlib")
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plot = PLOTS[name]
    assert plot.rows(ROOT / "benchmarks" / "results"), "a figure without rows is not drawn: store some, or drop it"
    with plt.rc_context(STYLE):
        figure = plot.draw(plt, plot.rows(ROOT / "benchmarks" / "results"))
        figure.canvas.draw()
        for panel in figure.axes:
            for axis, start, end in ((panel.xaxis, "x0", "x1"), (panel.yaxis, "y0", "y1")):
                labels = [tick.label1 for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())]
                shown = [label for label in labels if label.get_text() and label.get_visible()]
                boxes = sorted(
                    (getattr(box, start), getattr(box, end), label.get_text())
                    for label in shown if not label.get_rotation() for box in [label.get_window_extent()]
                )  # fmt: skip
                for (_, right, text), (left, _, following) in pairwise(boxes):
                    assert right <= left, f"{text!r} and {following!r} overlap"
        plt.close(figure)


def test_drawing_the_same_rows_gives_the_same_bytes(tmp_path):
    pytest.importorskip("matplotlib")
    from refold.bench import plots

    results = ROOT / "benchmarks" / "results"
    (first,) = plots.draw("operators", results, tmp_path / "a")
    (second,) = plots.draw("operators", results, tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()
    assert ">mamba-ssm<" in first.read_text()
