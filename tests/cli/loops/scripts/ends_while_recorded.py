"""The loop ends while steps are being recorded: 12 steps, 10 of which are skipped by default.

Must: exit with 0. The page has the steps that were recorded, and says that fewer than requested were.
"""

import torch

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(12):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("done")
