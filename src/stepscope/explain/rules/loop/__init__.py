"""Rules about the training loop around the model: its input, and what it does between steps."""
