"""Trains for 4 steps only: fewer than are skipped by default.

Must: exit with 0. No page, or one of what there is, and a message: 4 steps were seen, and `--skip 1 --steps 2` would
fit.
"""

import torch

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(4):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("done")
