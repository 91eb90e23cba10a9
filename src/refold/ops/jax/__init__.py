"""What the JAX backends of all operators share."""
