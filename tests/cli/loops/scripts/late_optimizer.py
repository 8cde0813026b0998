"""Evaluates for a while, and creates its optimizer only then; a second one replaces it halfway.

Must: exit with 0. The evaluation is not a step; the steps of both optimizers count.
"""

import torch

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
with torch.no_grad():
    for _ in range(20):
        model(torch.randn(8, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    if step == 30:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("done")
