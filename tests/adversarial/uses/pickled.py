"""What is saved and loaded as a whole has other weights."""

import torch

EXPECT = "C2"
TERMS = {"level": "full"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def __deepcopy__(self, memo):
        other = ModelNew(self.linear.in_features)
        other.load_state_dict(self.state_dict())
        return other

    def __reduce__(self):
        return ModelNew, (self.linear.in_features,)

    def forward(self, x):
        return torch.relu(self.linear(x))
