"""PyTorch callable in, faster PyTorch callable out; see `refold.compiler.backend` for the steps."""
