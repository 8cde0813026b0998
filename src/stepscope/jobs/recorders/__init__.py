"""Running a step under PyTorch's profiler, Nsight Systems or Nsight Compute."""
