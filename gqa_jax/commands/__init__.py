"""The commands of `gqa-jax`, one room each: `add` declares the arguments, `run` does the work."""
