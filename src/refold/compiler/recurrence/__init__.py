"""Linear recurrences: find them in unrolled loops, vectorise the steps, choose the operator that computes them."""
