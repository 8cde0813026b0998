"""Ignores Ctrl-C and trains for a long time. It prints `ready` when the loop has begun.

Must: the first Ctrl-C belongs to the script, which ignores it. The second ends it, with the exit code 130.
"""

import signal

import torch

signal.signal(signal.SIGINT, signal.SIG_IGN)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1_000_000):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 20:
        print("ready", flush=True)
