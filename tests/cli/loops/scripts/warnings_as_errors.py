"""Turns every warning into an error.

Must: exit with 0 and print `done`: stepscope and the profiler that it starts raise no warning in the script's
process.
"""

import warnings

import torch

warnings.simplefilter("error")
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(40):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("done")
