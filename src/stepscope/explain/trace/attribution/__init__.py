"""What each kernel belongs to: operator, module, layer, phase, step and the user's ranges."""

from stepscope.explain.trace.attribution.kernels import Attribution, attribute_kernels, attribute_ops

__all__ = ["Attribution", "attribute_kernels", "attribute_ops"]
