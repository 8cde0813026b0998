"""Ends with os._exit(4), which runs no cleanup of Python. Usage: os_exit.py [STEP]

Must: exit with 4. If the steps were recorded by then, the page or the command that makes it.
"""

import os
import sys

import torch

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == int(sys.argv[1] if len(sys.argv) > 1 else 30):
        sys.stdout.flush()
        os._exit(4)
