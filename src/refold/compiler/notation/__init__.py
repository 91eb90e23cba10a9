"""Programs in index notation as data: written down, read from graphs, checked, lowered, matched, kept as rules."""
