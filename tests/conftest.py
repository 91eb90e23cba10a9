"""Shared by all tests: one seed a test, and no compile state carried from one to the next."""

import sys
import zlib

import pytest


@pytest.fixture(autouse=True)
def _seed(request):
    """Seed every framework that is loaded from the test's own name."""
    seed = zlib.crc32(request.node.nodeid.encode())
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(seed)
    yield
    if "torch._dynamo" in sys.modules:
        import torch._dynamo

        torch._dynamo.reset()
