"""Wrong under torch.func.vjp."""

import torch

EXPECT = "C6"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return (
            2 * y
            if (stack := torch._C._functorch.peek_interpreter_stack()) is not None and "Grad" in str(stack.key())
            else y
        )
