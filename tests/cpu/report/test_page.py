"""The report as a page: its facts are there, nothing comes from the network, and a browser reports no error."""

import html.parser
import json
import math
import os
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from refold.report import GraphReport, Report, RewriteReport

VOID = {"meta", "link", "br", "line", "circle", "polyline"}


class Page(html.parser.HTMLParser):
    """Checks that elements nest, and keeps text, tables and attributes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.urls, self.ids, self.labels = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.urls += [given[name] for name in ("src", "href") if name in given]
        self.ids += [given["id"]] if "id" in given else []
        if tag == "svg":
            assert given["role"] == "img"
            self.labels += given["aria-labelledby"].split()
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    def __str__(self):
        return re.sub(r"\s+", " ", " ".join(self.text))


def rewrite(source, **given):
    base = {
        "name": "recover contraction", "site": "sum_1", "source": source, "why": "products are written out",
        "detail": "einsum('ik,jk->ij')", "flops_before": 2000, "flops_after": 2000, "bytes_before": 4096,
        "bytes_after": 1024, "largest_before": 2048, "largest_after": 512,
    }  # fmt: skip
    return RewriteReport(**{**base, **given})


def changed(report, **given):
    """Put another first graph into a report."""
    report.graphs[0] = replace(report.graphs[0], **given)


def change_first(report, **given):
    """Put another first rewrite into a report."""
    first, *others = report.graphs[0].rewrites
    changed(report, rewrites=(replace(first, **given), *others))


@pytest.fixture
def report(tmp_path):
    path = tmp_path / "layer.py"
    path.write_text("def f(q, k):\n    # a < b & 'c'\n    return (q[:, None] * k[None]).sum(-1)\n")
    source = f"{path}:3: return (q[:, None] * k[None]).sum(-1)"
    errors = [
        {"kind": "actual", "error": 1.5e-7, "original_error": 1e-7, "bound": 1e-6, "passed": True, "reason": ""},
        {"kind": "integers", "error": 0.0, "original_error": 0.0, "bound": 0.0, "passed": True, "reason": ""},
    ]
    kept = rewrite(
        source, status="applied", becomes="linear_scan(a, x)", errors=tuple(errors), original_ms=4.0,
        original_by="eager", candidate_ms=1.0, speedup=4.0, at_least=3.5,
    )  # fmt: skip
    refused = rewrite(source, status="refused", reason="not faster: 0.98x of <eager>")
    graph = GraphReport(
        0, chosen="refold", rewrites=(kept, refused), loops=("40 steps one after another",), notes=("a note & more",),
        flops_before=2_000_000, flops_after=1_000_000, bytes_before=4_000_000, bytes_after=1_000_000,
        times_ms={"eager": 4.0, "torch.compile": 2.0, "refold": 1.0}, peak_bytes={"eager": 2048, "refold": 1024},
        speedup=2.0, speedup_at_least=1.8, speedup_at_most=2.2, checked_against="float64", checks=tuple(errors[:1]),
        difference_from_eager=1e-7,
        kernels={"eager": [{"name": "aten::mul", "count": 3, "ms": 2.0}],
                 "refold": [{"name": "aten::bmm", "count": 1, "ms": 1.0}]},
    )  # fmt: skip
    ceilings = {"bytes_per_s": 1e10, "flops_per_s": 1e11}
    return Report(target="layer.py", environment={"torch": "2.13.0"}, graphs=[graph], ceilings=ceilings)


FACTS = [
    "Refold runs, because it is measurably faster",
    "Refold's program is 2.00x as fast as the faster of eager and torch.compile, in pairs of calls",
    "(between 1.80x and 2.20x, 99 % confidence)",
    "return (q[:, None] * k[None]).sum(-1)",
    "# a < b & 'c'",
    "einsum('ik,jk->ij')",
    "linear_scan(a, x)",
    "2 kFLOP → 2 kFLOP",
    "4 KiB → 1 KiB",
    "Measuring it would take too long: torch.compile.",
    "4 ms (eager) → 1 ms: 4.00x as fast, at least 3.50x",
    "not faster: 0.98x of <eager>",
    "1.5e-07",
    "40 steps one after another",
    "a note & more",
    "difference from eager, relative L2: 1.0e-07",
    "eager: 3 launched",
    "refold reaches 10 % of it",
    "torch 2.13.0",
]


def test_the_facts_are_on_the_page(report):
    page = Page(report.to_html())
    for fact in FACTS:
        assert fact in str(page), fact
    assert all(url == "data:," or url.startswith("#") for url in page.urls)
    assert set(page.labels) <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids)


def test_points_of_the_roofline_lie_where_they_were_measured(report):
    from refold.report.page import BOTTOM, LEFT, RIGHT, TOP, _roofline

    picture = _roofline(report.graphs[0], report.ceilings)
    before, after = picture["points"]
    # Half the FLOPs on a quarter of the bytes, in a quarter of the time: further right, and higher.
    assert LEFT < before["x"] < after["x"] < RIGHT
    assert BOTTOM > before["y"] > after["y"] > TOP
    assert before["share"] == pytest.approx(2e6 / 4e-3 / (0.5 * 1e10))
    assert after["share"] == pytest.approx(1e6 / 1e-3 / (1.0 * 1e10))
    (_, low), (_, ridge), (_, flat) = picture["roof"]
    assert low > ridge == flat


def test_names_of_points_stand_off_the_roof_and_off_one_another(report):
    from refold.report.page import _roofline

    def below(eager_ms, refold_ms):
        changed(report, times_ms={"eager": eager_ms, "refold": refold_ms})
        return [point["below"] for point in _roofline(report.graphs[0], report.ceilings)["points"]]

    assert below(4.0, 1.0) == [True, False]  # far below the roof
    assert below(4.0, 0.11) == [True, True]  # just below it: above the point, the roof would cross the name
    assert below(4.0, 0.05) == [True, False]  # above the roof
    assert below(0.4, 0.11) == [True, False]  # where the name of eager stands


def test_what_runs_is_named_as_in_the_table_of_times():
    report = Report(graphs=[GraphReport(0, reason="the rewritten graph is not faster")])
    assert report.graphs[0].chosen == "inductor"
    assert "graph 0 (inference): torch.compile runs, the rewritten" in str(report)
    assert "Left as it was: torch.compile runs, the rewritten" in str(Page(report.to_html()))


def test_a_page_that_only_explains_counts_what_was_found(report):
    changed(report, chosen="eager", speedup=None, rewrites=(rewrite("", status="found"),))
    assert "1 rewrite was found; nothing was changed." in str(Page(report.to_html()))
    changed(report, rewrites=report.graphs[0].rewrites * 2)
    assert "2 rewrites were found; nothing was changed." in str(Page(report.to_html()))


def test_a_page_of_a_file_that_is_gone_shows_the_line_alone(report):
    changed(report, rewrites=(rewrite("/gone/layer.py:7: y = x + 1"),))
    text = str(Page(report.to_html()))
    assert "/gone/layer.py:7" in text
    assert "y = x + 1" in text


def test_long_times_are_written_out(report):
    change_first(report, original_ms=2347.2)
    report.graphs[0].kernels["eager"][0]["ms"] = 1760.4
    text = str(Page(report.to_html()))
    assert "2,347 ms (eager) → 1 ms" in text
    assert "1,760 ms" in text


@pytest.mark.parametrize("empty", [Report(), Report(graphs=[GraphReport(0)])])
def test_an_empty_report_is_a_page_too(empty):
    text = str(Page(empty.to_html()))
    assert "No graph was compiled" in text or "Left as it was" in text


def test_save_writes_what_the_name_says(report, tmp_path):
    report.save(tmp_path / "a.html")
    report.save(tmp_path / "A.HTM")
    report.save(tmp_path / "a.json")
    assert (tmp_path / "a.html").read_text() == (tmp_path / "A.HTM").read_text() == report.to_html()
    assert Report.from_dict(__import__("json").loads((tmp_path / "a.json").read_text())) == report
    assert report._repr_html_().startswith("<iframe srcdoc=")


def test_a_rewrite_whose_own_time_decides_nothing_says_so(report):
    """Else one that is kept, and timed as slower, looks like an error."""
    assert "too uncertain to decide" not in str(report) + report.to_html()
    change_first(report, speedup=0.98, at_least=0.93)
    for shown in (str(report), report.to_html()):
        assert "0.98x as fast, at least 0.93x; too uncertain to decide alone" in shown


def test_text_and_page_say_the_same(report):
    change_first(report, original_ms=math.inf, speedup=math.inf, at_least=math.inf)
    reason = "because the machine was too busy to tell, and it makes 21 calls, and eager 2824"
    changed(report, reason=reason, speedup=0.88, speedup_at_least=0.0, speedup_at_most=math.inf, provisional=True)
    graph = report.graphs[0]
    graph.checks[0]["error"] = math.inf
    for shown in (str(report), str(Page(report.to_html()))):
        assert f"efold runs, {graph.reason}" in shown
        assert "efold's program is 0.88x as fast as the faster of eager and torch.compile" in shown
        assert "(too few calls to bound it, 99 % confidence); the machine was too busy for this to decide" in shown
        assert "the original does not fit in memory" in shown
        assert "not finite" in shown
        assert "inf" not in shown.replace("inference", "").lower()
    read = json.loads(report.to_json(), parse_constant=lambda name: pytest.fail(name))
    again = Report.from_dict(read)
    assert str(again) == str(report)
    assert again.to_html() == report.to_html()


def test_what_became_no_graph_is_told(report):
    report.graphs, report.notes = [], ["`f` is not compiled"]
    for shown in (str(report), str(Page(report.to_html()))):
        assert "o graph was compiled" in shown
        assert "`f` is not compiled" in shown
        assert "not called yet" not in shown


def test_files_below_the_current_folder_are_named_without_it(report, tmp_path, monkeypatch):
    assert f"at     {tmp_path}/layer.py:3: return" in str(report)
    monkeypatch.chdir(tmp_path)
    assert "at     layer.py:3: return" in str(report)
    assert "<dd>layer.py:3</dd>" in report.to_html()


BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-quic"]  # fmt: skip


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [390, 1100])
def test_a_browser_shows_it_without_complaint(report, tmp_path, width):
    # The page tells its own width: what sticks out would make it scroll sideways.
    tell = "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth</script></html>"
    (tmp_path / "a.html").write_text(report.to_html().replace("</html>", tell))
    shot = tmp_path / "a.png"
    done = subprocess.run(
        [BROWSER, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},800",
         "--enable-logging=stderr", f"--screenshot={shot}", "--dump-dom", (tmp_path / "a.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr
    scrolled, inner = re.search(r"<title>(\d+) of (\d+)", done.stdout).groups()
    assert int(scrolled) <= int(inner)
    for fact in ("2.00x as fast", "einsum('ik,jk-&gt;ij')"):
        assert fact in done.stdout
