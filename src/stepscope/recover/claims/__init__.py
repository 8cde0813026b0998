"""Claims about a model, and how to check them against a run: `stepscope verify`."""
