"""Models over several devices with ``jax.sharding``: heads cut (`heads`), or the time of a prompt cut (`time`)."""
