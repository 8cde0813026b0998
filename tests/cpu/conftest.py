"""Settings for the tests that measure."""

from stepscope.measure import timing

# Recorders are weighed for the fewest turns: profilers take as long to stop as they ran, and no test is about weights.
timing.TURNS_S = 0.0
