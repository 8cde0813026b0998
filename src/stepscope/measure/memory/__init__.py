"""Memory: how much a process may take and took, and a step's memory piece by piece."""
