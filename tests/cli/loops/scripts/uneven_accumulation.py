"""Accumulates 4 micro-batches per step, evaluates every 10 steps, and has an incomplete step at the end of each
epoch.

Must: exit with 0. `backwards_per_step` is close to 4. The evaluation is not a step, and belongs to the one around it.
"""

import torch

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
done = 0
for _ in range(4):
    for batch in range(42):
        loss = model(torch.randn(8, 16)).square().mean() / 4
        loss.backward()
        if batch % 4 == 3 or batch == 41:
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done % 10 == 0:
                with torch.no_grad():
                    model(torch.randn(64, 16)).square().mean().item()
print(done, "steps")
