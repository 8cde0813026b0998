"""Readers of files from other tools: PyTorch profiler, Nsight Systems, Nsight Compute."""
