"""What a CUDA card computes with besides MLX's own kernels: a few of ours, compiled in a second without headers."""
