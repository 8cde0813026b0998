"""The loop runs in a thread that is not the main one, which only waits for it.

Must: exit with 0. The steps are found and recorded: hooks and profiler work in the thread of the loop.
"""

import threading

import torch


def train():
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(40):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


thread = threading.Thread(target=train)
thread.start()
thread.join()
print("done")
