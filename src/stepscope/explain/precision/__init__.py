"""Tables of what `precision` measured, and what autocast does."""
