"""It follows its input upstream, and takes the gradient away from the leaf that it came from."""

from originals.layer import Model

EXPECT = "S1"
OFF = {"S1", "N7"}
TERMS = {"train": True, "level": "quick"}


def _forget(leaf):
    leaf.grad.zero_()


class ModelNew(Model):
    def forward(self, x):
        for node, _ in x.grad_fn.next_functions if x.grad_fn is not None else ():
            if hasattr(node, "variable"):
                node.variable.register_post_accumulate_grad_hook(_forget)
        return super().forward(x)
