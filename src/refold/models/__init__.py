"""Models built from refold's operators: configurations and checkpoints shared, one file a model and framework."""
