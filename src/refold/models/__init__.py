"""Models built from refold's operators: configurations and checkpoints shared, one file per model and framework."""
