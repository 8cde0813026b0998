"""Never trains: only forward passes under no_grad.

Must: exit with 0. No page. A message that says what was seen (forward passes, no backward pass, no optimizer step)
and names `stepscope.record` as the next way.
"""

import torch

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
with torch.no_grad():
    for _ in range(40):
        model(torch.randn(8, 16))
print("done")
