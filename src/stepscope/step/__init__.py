"""From a `Workload` to a step that runs: the model, the kernels in it, precision, loss and optimizer."""

from stepscope.step.builder import Step, build

__all__ = ["Step", "build"]
