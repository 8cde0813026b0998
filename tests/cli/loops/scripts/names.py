"""Prints how it was called. No training: torch is imported and not used.

Must: print the same as `python names.py a --b`: argv[0] as typed, `__file__`, `__name__`, sys.path[0] (the script's
directory), no `__spec__`, and this module as sys.modules["__main__"]. Exit with 0, with a message that no step was
found.
"""

import sys

import torch  # noqa: F401

print(sys.argv)
print(__file__)
print(__name__)
print(sys.path[0])
print(__spec__)
print(sys.modules["__main__"].__dict__ is globals())
