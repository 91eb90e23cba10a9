"""Code that several tests share: programs, loops, models and checkpoints."""
