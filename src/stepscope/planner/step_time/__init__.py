"""The time of a simulated step: from operators to kernels (`kernels_of`), to their time on a calibrated GPU
(`measured_times`), the host's time (`host_time`), and both on one timeline (`timeline`).
"""

from stepscope.planner.step_time.kernels_of import Bound, PlannedKernel
from stepscope.planner.step_time.measured_times import NotCalibratedError
from stepscope.planner.step_time.timeline import PredictedPhase, PredictedStep, predict_step

__all__ = ["Bound", "NotCalibratedError", "PlannedKernel", "PredictedPhase", "PredictedStep", "predict_step"]
