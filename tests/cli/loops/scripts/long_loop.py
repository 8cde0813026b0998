"""100,000 steps. Usage: long_loop.py [STEPS]. It prints the time of a block of steps before the recording and at
the end.

Must: exit with 0. The last block is as fast as without stepscope, within 1%: no hook is left, nothing is collected
per step, and memory does not grow (the last line is the growth of the resident memory over the second half).
"""

import resource
import sys
import time

import torch

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
count = int(sys.argv[1] if len(sys.argv) > 1 else 100_000)
block = count // 20
started = time.perf_counter()
halfway_kib = 0
for step in range(count):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % block == 0:
        now = time.perf_counter()
        print(f"steps {step + 1 - block} to {step + 1}: {(now - started) / block * 1e6:.1f} us per step", flush=True)
        started = now
    if step == count // 2:
        halfway_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("grew by", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - halfway_kib, "KiB")
