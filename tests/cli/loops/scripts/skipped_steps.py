"""A GradScaler that skips every fifth step, because the loss is infinite.

Must: exit with 0. A skipped step is a step: it is counted in `LoopFacts.skipped_steps`, and two iterations never
become one.
"""

import torch

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for step in range(40):
    loss = model(torch.randn(8, 16)).square().mean()
    if step % 5 == 4:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print("done")
