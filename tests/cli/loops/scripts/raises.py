"""Raises in a step, by default in step 5, before anything is recorded. Usage: raises.py [STEP]

Must: exit with 1 and print Python's own traceback, which ends with this file's line and has no frame of stepscope
above it. A page of the steps recorded until then; if there are none, a message that says how many steps were seen.
"""

import sys

import torch

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == int(sys.argv[1] if len(sys.argv) > 1 else 5):
        raise RuntimeError(f"broken in step {step}")
