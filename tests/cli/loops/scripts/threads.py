"""Two threads train their own models at the same time.

Must: exit with 0. Either one thread's steps are recorded, or a message says that several threads train. Steps of the
two are never mixed into one.
"""

import threading

import torch

torch.set_num_threads(1)


def train(name):
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(40):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(name, "done", flush=True)


threads = [threading.Thread(target=train, args=(name,)) for name in ("a", "b")]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
