"""Changes into a directory of its own before the steps are over, and removes it at the end. Usage: chdir.py

Must: exit with 0. A relative `--out` is relative to the directory in which the command was typed.
"""

import os
import shutil
import tempfile

import torch

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
folder = tempfile.mkdtemp()
for step in range(40):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 5:
        os.chdir(folder)
shutil.rmtree(folder)
print("done")
