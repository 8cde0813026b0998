"""Runs a workload and measures it. This half of the package requires torch."""
