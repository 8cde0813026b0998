"""What happened, on disk: readable without torch, on a machine that has never seen a GPU."""
