"""What does not exist on this machine, and what stands in for it: a GPU, its compiler and its graphs."""
