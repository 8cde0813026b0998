"""What model made these counters, and is a claim about it true? No torch."""
