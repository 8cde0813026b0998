"""Worker and rank processes: how they start, what is said to them, how they end."""
