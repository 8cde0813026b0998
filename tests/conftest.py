"""Settings for all tests."""

import signal

from hypothesis import settings

from stepscope.jobs.workers.instructions import limit_instructions

# Before any test imports torch, and for every command that a test starts.
limit_instructions()

# How long an example takes says more about the machine than about the code.
settings.register_profile("stepscope", deadline=None)
settings.load_profile("stepscope")

# Whoever runs the tests in the background may have Ctrl-C ignored, and whether it works is one of the things tested.
signal.signal(signal.SIGINT, signal.default_int_handler)
