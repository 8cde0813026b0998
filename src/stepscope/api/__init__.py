"""The public Python API. `stepscope` exports its names; the command line is a thin layer on it."""
