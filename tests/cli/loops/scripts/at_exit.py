"""Trains in a function that Python runs at exit, after the script's last line.

Must: exit with 0 and print `done` and then `trained at exit`. The script's own exit functions run before or without
us; either way nothing hangs and nothing raises.
"""

import atexit

import torch


def train():
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(40):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained at exit")


atexit.register(train)
print("done")
