"""Uses torch.profiler.profile with a schedule that records steps 20 to 22, in the middle of ours or next to it.

Must: exit with 0. The script's own trace is written and has 3 steps. Never two profilers at once, which PyTorch
refuses.
"""

import torch
from torch.profiler import profile, schedule

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with profile(
    schedule=schedule(wait=19, warmup=1, active=3, repeat=1),
    on_trace_ready=lambda profiler: profiler.export_chrome_trace("own_trace.json"),
) as profiler:
    for _ in range(40):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()
print("done")
