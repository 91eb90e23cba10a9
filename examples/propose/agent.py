"""A program that proposes, for ``refold optimize --propose "command:python examples/propose/agent.py"``.

It reads a request in JSON from standard input and writes proposals in JSON to standard output. A real one would ask a
model; this one looks for one thing: a region that sums exponentials of a sum. First it proposes a source, and when it
sees what came of that, a program in index notation for the same: ``exp(x + w)`` is ``exp(x) * exp(w)``.
"""

import json
import sys

SOURCE = """
import torch

class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(width))

    def forward(self, x):
        return torch.exp(x) * torch.exp(self.w).sum()
"""


def programs(request):
    """Yield a program for each region ``y = sum of exp(a + b)`` where ``b`` has only axes that are summed."""
    for region in request["regions"]:
        program = region["program"]
        words = [step["do"] for step in program["steps"]]
        if words != ["add", "exp", "contract"]:
            continue
        a, b = program["steps"][0]["of"]
        summed = b.split("[")[1].rstrip("]")
        kept = program["steps"][2]["let"].split("[")[1].rstrip("]")
        steps = [
            {"let": f"e[{kept}]", "do": "exp", "of": [a]},
            {"let": f"f[{summed}]", "do": "exp", "of": [b]},
            {"let": f"y[{kept}]", "do": "contract", "of": [f"e[{kept}]", f"f[{summed}]"]},
        ]
        result = "y[" + program["result"].split("[")[1]
        yield {"kind": "program", "region": region["name"], "note": "exp(a + b) = exp(a) exp(b)",
               "program": {"inputs": program["inputs"], "sizes": {}, "steps": steps, "result": result}}  # fmt: skip


def main():
    """Answer one request."""
    request = json.load(sys.stdin)
    tried = {attempt["kind"] for attempt in request["attempts"]}
    found = []
    if "source" not in tried:
        found = [{"kind": "source", "text": SOURCE, "note": "exp(a + b) = exp(a) exp(b)"}]
    elif "program" not in tried:
        found = list(programs(request))
    json.dump({"proposals": found}, sys.stdout)


if __name__ == "__main__":
    main()
