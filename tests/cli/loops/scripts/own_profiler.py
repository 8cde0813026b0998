"""Runs its own torch.profiler.profile around the whole loop and writes a trace.

Must: exit with 0. The script's `own_trace.json` is complete, with 40 steps. stepscope says that a profiler is active
already and records what is possible (step times and phases without kernels, or nothing), instead of failing.
"""

import torch
from torch.profiler import profile

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with profile() as profiler:
    for _ in range(40):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()
profiler.export_chrome_trace("own_trace.json")
print("done")
