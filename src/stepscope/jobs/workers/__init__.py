"""Worker and rank processes: how they start, the messages they exchange, and how they end."""
