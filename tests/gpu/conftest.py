"""The processes of a parallel run share one GPU."""

import gc

import pytest


@pytest.fixture(autouse=True)
def _memory_goes_back():
    """What a test is done with is for the other processes, not for the cache of this one."""
    yield
    import torch

    if torch.cuda.memory_reserved() > 1 << 30:
        gc.collect()
        torch.cuda.empty_cache()
