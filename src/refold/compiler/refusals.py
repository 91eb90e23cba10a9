"""Why a loop is not captured or is no scan, and why a rewrite is not used: reasons with lasting ids and remedies.

The id stands in brackets after the reason, in reports and notes; docs/compiler.md lists them all. Design decision 29.
"""

from __future__ import annotations

REASONS = {
    "carries-coupled": (
        "several carries depend on one another, and are not a small linear system",
        "Up to four carries of one shape (16 on a CPU with Numba, 8 on a GPU with Triton) "
        "that depend on one another linearly are one scan. "
        "Let the others depend on fewer carries.",
    ),
    "carry-dtype": (
        "the state is not floating point, or its shape is not known",
        "Keep the state in a floating-point dtype, and give it a shape that is known.",
    ),
    "carry-not-affine": (
        "the new state is not `a * state + b`",
        "Only `a * state + b`, elementwise, also within bounds, is a scan: nonlinear recurrences run step by step.",
    ),
    "carry-not-tensor": (
        "the loop carries, reads or returns something that is not one tensor",
        "Use single tensors, or integers that count. Pass a number that changes between calls as a tensor.",
    ),
    "carry-shape": (
        "a shape depends on the step",
        "Give each tensor that the loop carries or keeps one shape, the same at every step.",
    ),
    "carry-squared": (
        "the state is multiplied by itself",
        "Only `a * state + b`, elementwise, is a scan: nonlinear recurrences run step by step.",
    ),
    "complex-as-real": (
        "the state is kept as the real and imaginary parts of complex numbers",
        "Carry the complex tensor itself, and take torch.view_as_real of it only for what a step returns.",
    ),
    "decay-sign": (
        "in training, a state that is read and corrected is multiplied by what may be negative",
        "Compute the decay in the compiled function, as torch.exp(g) or torch.sigmoid(a).",
    ),
    "deque": (
        "the loop changes a deque of 16 items or more, or of other things than tensors",
        "Keep less than 16 tensors in it, all of one form, or keep the last values in variables: `y1, y2 = y, y1`. "
        "Read inputs by `x[:, t]`.",
    ),
    "detached": (
        "a value of a recurrence is detached in training",
        "Detach after the recurrence, or run it under torch.no_grad().",
    ),
    "dictionary-keys": ("the keys of a dictionary change in the loop", "Make all keys before the loop."),
    "dynamo": (
        "Dynamo itself cannot trace the body",
        "Write this line with operations on tensors, or move it out of the loop. The message is Dynamo's.",
    ),
    "early-exit": (
        "`break`, `return` or an exception may leave the loop",
        "Loop over a number of steps that is known before the loop, and select what you need after it.",
    ),
    "first-step": (
        "the first step runs another program than the other steps",
        "Give the state before the loop the dtype, shape and gradient that it has after a step.",
    ),
    "generator": (
        "the loop contains `yield`",
        "Write a `for` loop without `yield`, and without functions such as `itertools.accumulate`.",
    ),
    "global-state": ("a global variable is set", "Use local variables or attributes."),
    "graph-differs": (
        "the rewritten graph as a whole is not equal to the original",
        "Nothing needs to be done; please report it, with the report.",
    ),
    "graph-slower": (
        "the rewritten graph as a whole is not measurably faster",
        'Nothing needs to be done; accept="always" uses it all the same.',
    ),
    "higher-order": (
        "an operation in a recurrence, or around it, takes a function (a checkpoint in a step, a nested scan)",
        "Move such operations out of the recurrence. Checkpoint the function that has the loop, and read no lists of "
        "its caller there.",
    ),
    "hook": (
        "a hook is registered in the loop, or on a result",
        "Register it on `h * 1`, if it is for what reads `h` after the loop, or run the loop outside of the compiled "
        "function.",
    ),
    "identity": ("tensors are compared with `is`", "Do not compare tensors with `is` in the loop."),
    "in-place": (
        "a step, or what follows the loop, changes a tensor in place",
        "Write `h = h + x` instead of `h += x`, and `h = torch.where(mask, y, h)` instead of `h[mask] = y`. "
        "Change results of the loop only after copying them.",
    ),
    "initial-state": (
        "the first step reads a value of another kind or shape",
        "Start from a tensor of the shape and dtype that the state has after a step.",
    ),
    "inputs-unknown": (
        "no inputs could be made for the check of a region",
        'Nothing needs to be done; verify="off" uses the rewrite without a check.',
    ),
    "list-kind": (
        "a list gets other things than one tensor per step",
        "Append tensors of one shape and dtype, one per step.",
    ),
    "list-read": (
        "the loop reads or changes a list that it makes longer, other than at its ends",
        "Read only the ends of a list that grows (`hs[-1]`), or keep what is needed in a variable.",
    ),
    "loop-inside": (
        "the loop contains another long loop",
        "Vectorise the inner loop, or write it as an operator of `refold.ops`.",
    ),
    "metadata-wrong": (
        "a rewrite states other shapes, strides or dtypes than its values have",
        "Nothing needs to be done; please report it, with the report.",
    ),
    "mixes-elements": (
        "an operation combines elements of the state, as a matrix product does",
        "A matrix that is not diagonal couples elements: such recurrences run step by step. A delta rule in chunks "
        "is looked for afterwards, among the operations of the unrolled loop.",
    ),
    "mode": (
        "autocast or a function transform is active",
        "Run the loop without torch.autocast and without transforms of torch.func; cast its inputs instead.",
    ),
    "no-gradient": ("an operation has no gradient", "Run the loop under torch.no_grad(), or leave the operation out."),
    "no-iteration-form": (
        "an operation has no rule that computes all steps at once",
        "Compute it before the loop, for all steps at once.",
    ),
    "no-place": (
        "the forward has no place for a rewrite",
        "Nothing needs to be done. For the rewrite, give the result a name, and read it only after all its inputs.",
    ),
    "no-scan": ("the loop carries nothing", "Nothing needs to be done: the loop carries nothing that is used."),
    "not-equal": (
        "a rewrite is not equal to what it replaces, within the bound",
        "Nothing needs to be done; please report it, with the report.",
    ),
    "not-faster": (
        "a rewrite is not faster than what it replaces",
        'Nothing needs to be done; accept="always" uses it all the same.',
    ),
    "not-traced": (
        "a graph cannot be traced before autograd",
        "Nothing needs to be done. Please report it, unless the message is about your own code.",
    ),
    "number-arithmetic": (
        "arithmetic with the number of the step cannot be done exactly for all steps at once",
        "Compute it for all steps before the loop, as a tensor with a time axis.",
    ),
    "outside-change": (
        "the loop changes something outside of it",
        "Return new values in place of changing objects outside of the loop, and delete nothing.",
    ),
    "plan-misfit": (
        "a plan does not fit the program",
        "Make a new plan on this version of the program, or compile without one.",
    ),
    "python-constant": ("a step makes a large tensor from Python numbers", "Make the tensor before the loop."),
    "python-state": (
        "a variable changes that is neither a tensor nor a number that grows evenly",
        "Carry a tensor, or a number that grows by the same number, or by the same factor, at every step.",
    ),
    "randomness": (
        "the loop draws random numbers",
        "Draw all random numbers before the loop, as a tensor with a time axis.",
    ),
    "read-computed": (
        "a step slices what the loop computes",
        "Slice only tensors that exist before the loop; keep what later steps need in variables.",
    ),
    "read-uneven": (
        "the slices that are read are not evenly spaced, or not of one tensor",
        "Read position t, or evenly spaced slices, of one tensor: `x[:, t]`.",
    ),
    "refold-failed": (
        "refold itself failed",
        "Please report it, with the output of `refold doctor`.",
    ),
    "sequence-uneven": (
        "the items of the loop are not evenly spaced",
        "Loop over a range, or over evenly spaced items of one tensor.",
    ),
    "sequence-unknown": (
        "the number of steps is not known before the loop",
        "Loop over a range, or over a list or tensor of known length.",
    ),
    "shared-memory": (
        "a result or a written tensor shares memory with something that is read",
        "Write results to a tensor that is made in the function and read only after the loop.",
    ),
    "size-unknown": (
        "a size is a symbol where a number is needed",
        "Compile with dynamic=False, or mark fewer sizes as dynamic.",
    ),
    "state-unstable": (
        "the type, shape, dtype or gradient of the state changes from step to step",
        "Give every variable the same type, shape, dtype and gradient after each step.",
    ),
    "states-read": (
        "the states of a delta rule are read otherwise than by queries",
        "Read a step's state only after its write, and by `(S * q[..., None]).sum(-2)`; return the last one.",
    ),
    "step-long": (
        "too many operations depend on one another in a step",
        "Move what does not depend on the state out of the loop.",
    ),
    "step-number": (
        "a decision in the loop depends on the number of the step",
        "Put what differs from step to step into a tensor with a time axis.",
    ),
    "steps-differ": (
        "the steps are not alike",
        "Give all steps the same operations, shapes and dtypes; move special steps out of the loop.",
    ),
    "too-long": (
        "Inductor would take too long for an unrolled loop",
        "Raise compile_budget, or write the loop so that it can be captured.",
    ),
    "write-uneven": (
        "the slices that are written overlap, leave gaps, or differ in width",
        "Write position t of one tensor, or slices next to one another: `y[:, t] = ...`.",
    ),
}
"""By id: what was found, and what to do."""


class Refusal(Exception):
    """A loop stays as it is; the message says why, for a person, with the id of the reason."""

    def __init__(self, reason: str, message: str, line: str = "", code: str = "") -> None:
        """Refuse.

        Args:
            reason: A key of `REASONS`.
            message: What was found, with its name.
            line: The user's line that it was found in; empty if it is the loop's own.
            code: The user's expression that it was found in; empty if it is not known.
        """
        super().__init__(message)
        self.reason, self.remedy, self.line, self.code = reason, REASONS[reason][1], line, code

    def found_at(self, line: str, code: str) -> None:
        """Note where it was found, unless that is known more closely."""
        if not self.line:
            self.line, self.code = line, self.code or code

    def __str__(self) -> str:
        """Return the message with expression, line and id."""
        code = f": `{self.code}`" if self.code and f"`{self.code}`" not in self.args[0] else ""
        return f"{self.args[0]}{code}{f' ({self.line})' if self.line else ''} [{self.reason}]"

    @property
    def advice(self) -> str:
        """The message and the remedy."""
        return f"{self}: {self.remedy}"

    def told_of(self, place: str) -> str:
        """Return the advice after the place that it is about; a line that the place begins with is not repeated."""
        repeated = self.line and place.startswith(self.line)
        return f"{place}: {self.advice.replace(f' ({self.line})', '', 1) if repeated else self.advice}"


def refused(reason: str, message: str) -> str:
    """Say why a rewrite is not used, for reports: the message, the id and the remedy."""
    return Refusal(reason, message).advice
