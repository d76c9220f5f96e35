"""The scripted engine: acts out a run from a script, without MLX."""
