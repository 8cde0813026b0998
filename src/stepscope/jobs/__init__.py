"""Long-running jobs behind the commands: sweeps over many cases, each case in its own process."""
