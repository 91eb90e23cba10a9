import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(256, 512) / 512**0.5)

    def forward(self, x):
        for _ in range(20):
            y = torch.relu(x @ self.weight.T)
        return y


def get_inputs():
    return [torch.randn(2048, 512)]
