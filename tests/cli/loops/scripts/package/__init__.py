"""A package with a module to run: `stepscope run -m package.train`, in the directory that contains it."""
