"""Is interrupted in step 20 (or in the given step), catches KeyboardInterrupt, saves and ends normally, as people
do to stop early.

Must: exit with 0 and print `saved after 20 steps`: the first Ctrl-C belongs to the script. The page of what was
recorded.
"""

import signal
import sys

import torch

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
when = int(sys.argv[1] if len(sys.argv) > 1 else 20)
try:
    for step in range(40):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == when:
            signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("saved after", step, "steps")
