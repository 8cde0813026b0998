"""Each attention implementation in isolation: its correctness, memory and time."""
