"""Models over several devices with ``jax.sharding``: sharded by heads (`heads`), or by time of a prompt (`time`)."""
