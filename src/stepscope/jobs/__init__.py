"""Long jobs in the background of a verb: sweeps of many cases, each in its own process."""
