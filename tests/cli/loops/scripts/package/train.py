"""Run with `-m package.train`: relative imports work, and `__spec__` and `__package__` are set.

Must: exit with 0 and print `__main__ package package.train` and the arguments as Python passes them.
"""

import sys

import torch

from .model import build

if __name__ == "__main__":
    print(__name__, __package__, __spec__.name)
    print(sys.argv[1:])
    model, optimizer = build()
    for _ in range(40):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
