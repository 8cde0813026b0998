"""The evidence in a recording: its kernels, their order, and the position of each in the model."""
