"""It is defined in a branch, as where one of two libraries is there."""

import torch

try:
    import a_library_that_is_not_here as fast
except ImportError:
    fast = None

if fast is None:

    class Plain(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear = torch.nn.Linear(width, width)

        def forward(self, x):
            return torch.relu(self.linear(x))

    ModelNew: type = Plain
