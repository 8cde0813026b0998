"""Replaces sys.stdout and sys.stderr by a file of its own, and closes it at the end.

Must: exit with 0. `log.txt` has the script's lines and nothing of stepscope, whose messages still reach the terminal.
"""

import sys
from pathlib import Path

import torch

sys.stdout = sys.stderr = Path("log.txt").open("w")
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step)
sys.stdout.close()
