"""The public Python API. The `stepscope` package exports its names, and the command line is a thin layer on top."""
