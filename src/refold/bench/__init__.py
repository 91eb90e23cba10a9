"""Benchmarks: ``refold bench list | run | store | compare | plot | env``.

A suite is a generator of rows (`suites`); a row is a dictionary that one line of a JSONL file holds (`rows`). Stored
rows and the log of attempts are in the folder ``benchmarks/``.
"""
