"""Imports a module next to it, also if the command is typed in another directory.

Must: exit with 0 and print `done`.
"""

import torch
from sibling_model import build

model, optimizer = build()
for _ in range(40):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("done")
