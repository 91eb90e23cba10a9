"""What the Numba backends of all operators share."""
