"""Forks in step 15. The child trains on, and so does the parent, which waits for it at the end.

Must: exit with 0 and print `parent 40` and `child 40` once each. One page, that of the parent: the child records
nothing and does not write into the parent's directory.
"""

import os

import torch

torch.set_num_threads(1)  # OpenMP does not survive a fork
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
child = None
for step in range(40):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 15:
        child = os.fork()
print("child" if child == 0 else "parent", step + 1, flush=True)
if child == 0:
    os._exit(0)
assert child is not None
_, status = os.waitpid(child, 0)
assert status == 0
