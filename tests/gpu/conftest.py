"""The processes of a parallel run share one GPU."""

import gc

import pytest


def pytest_collection_modifyitems(items):
    """Let tests on a GPU take as long as the compilation of their kernels does."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def _memory_goes_back():
    """What a test is done with is for the other processes, not for the cache of this one."""
    yield
    import torch

    if torch.cuda.memory_reserved() > 1 << 30:
        gc.collect()
        torch.cuda.empty_cache()
