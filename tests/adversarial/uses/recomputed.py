"""Wrong where it is computed once more in a backward, to keep less until then."""

import torch

EXPECT = "C6"
TERMS = {"train": True}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return 2 * y if torch._C._current_graph_task_id() != -1 else y
