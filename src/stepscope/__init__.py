"""stepscope shows where one training step of a Transformer spends its time and memory, and says why."""

from stepscope.annotate import annotate

__all__ = ["__version__", "annotate"]

__version__ = "0.1.0"
