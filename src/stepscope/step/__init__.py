"""Builds a runnable training step from a `Workload`: model, kernels, precision, loss and optimizer."""

from stepscope.step.builder import Step, build

__all__ = ["Step", "build"]
