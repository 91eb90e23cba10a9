"""What several tests share: programs, loops, models and checkpoints."""
