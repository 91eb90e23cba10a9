"""Check a rewrite numerically and time it: one region, and then the whole program."""
