"""What a recording shows of a run: its kernels, the order in which they ran, and where each of them stands."""
