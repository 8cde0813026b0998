"""Closes the file descriptors of standard output and error in step 15.

Must: exit with 0. stepscope cannot say anything any more, and does not fail because of it; the page is written.
"""

import os

import torch

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 15:
        os.close(1)
        os.close(2)
os._exit(0)
