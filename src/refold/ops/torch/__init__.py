"""What the PyTorch and Triton backends of all operators share: registration, launches, chunks."""
