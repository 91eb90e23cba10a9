"""One rewrite a file. A pass edits an ATen graph in place and yields a `Rewrite` for each change."""
