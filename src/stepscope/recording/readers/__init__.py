"""Foreign files as recordings: PyTorch's profiler, Nsight Systems, Nsight Compute."""
