"""Two runs as one report: what changed, why, and everything else side by side."""
