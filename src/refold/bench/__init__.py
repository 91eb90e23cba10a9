"""Benchmarks of the operators on a GPU: checked against float64 first, then timed, one JSON line a case."""
