"""Recordings on disk: readable without torch, on a machine without a GPU."""
