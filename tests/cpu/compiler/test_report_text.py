"""The text of the report, and the progress in the log."""

import logging
import time

import pytest
import torch

import refold
from refold.compiler import patience as module
from refold.compiler.environment import environment
from refold.compiler.patience import patience
from refold.report import GraphReport, Report


def test_a_long_compile_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(module, "_last", -module.PAUSE_S)
    caplog.set_level(logging.WARNING, "refold")
    with patience():
        until = time.monotonic() + 60
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.01)
    for _ in range(2):
        with patience():
            time.sleep(0.05)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "compiles for more than 0 s" in record.getMessage()


def test_a_short_compile_and_who_sees_every_step_are_spared_the_line(monkeypatch, caplog):
    monkeypatch.setattr(module, "_last", -module.PAUSE_S)
    with patience():
        pass
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    caplog.set_level(logging.INFO, "refold")
    with patience():
        time.sleep(0.05)
    assert caplog.records == []


def test_every_step_is_logged(caplog):
    caplog.set_level(logging.INFO, "refold")
    refold.compile(lambda x, y: (x[:, None] * y[None]).sum(-1), accept="always")(torch.randn(9, 8), torch.randn(7, 8))
    text = caplog.text
    assert all(word in text for word in ("compiling graph 0", "sum_1", "checking the whole graph", "refold runs"))


def test_a_report_before_the_first_call():
    assert "it was not called yet" in str(refold.compile(torch.sin).report)


@pytest.mark.parametrize("rivals", [["eager"], ["eager", "torch.compile"]])
def test_the_sentence_says_what_was_timed(rivals):
    times = dict.fromkeys(rivals, 1.1) | {"refold": 1.0}
    graph = GraphReport(
        0, chosen="eager", times_ms=times, speedup=1.12, speedup_at_least=0.9, speedup_at_most=1.3, rewrites=[]
    )
    text = str(Report(graphs=[graph]))
    assert f"1.12x as fast as {'the faster of eager and torch.compile' if len(rivals) > 1 else 'eager'}" in text
    assert "between 0.90x and 1.30x" in text


def test_threads_are_counted_in_english():
    threads = torch.get_num_threads()
    try:
        for count, words in [(1, "1 thread"), (2, "2 threads")]:
            torch.set_num_threads(count)
            assert environment()["processor"].endswith(f", {words}")
    finally:
        torch.set_num_threads(threads)


@pytest.mark.exhaustive
def test_steps_of_a_loop_are_counted_once():
    cell = torch.nn.GRUCell(4, 4)

    def gru(x):
        h = torch.zeros(x.shape[0], 4)
        for t in range(12):
            h = cell(x[:, t], h)
        return h

    report = refold.explain(gru, torch.randn(2, 12, 4))
    assert report.graphs[0].loops
    assert all("(12 steps" in loop for loop in report.graphs[0].loops)


def test_a_report_that_torch_compile_fills_says_where_it_was_made():
    report = Report()
    torch.compile(torch.sin, backend="refold", options={"report": report})(torch.ones(3))
    assert report.graphs
    assert {"refold", "torch", "processor", "date"} <= report.environment.keys()
