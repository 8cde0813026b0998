"""stepscope shows where one training step of a Transformer spends its time and memory, and says why."""

__version__ = "0.1.0"
