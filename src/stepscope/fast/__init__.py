"""The fast step of any model: traced, rewritten, compiled, and captured in CUDA graphs."""
