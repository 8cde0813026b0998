"""Predict a step without a GPU: its memory from a simulation with fake tensors, its time from a table of the GPU."""
