"""Has flags of its own that look like those of `stepscope run`: --steps, --skip, --out, --stop, -h.

Must: exit with 0 and print `steps=40 out=mine stop=True`, when run as `run own_flags.py --steps 40 --out mine
--stop`. Flags after the script belong to it, and `run own_flags.py --help` prints its own help.
"""

import argparse

import torch

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--out", default="")
    parser.add_argument("--stop", action="store_true")
    args = parser.parse_args()
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(args.steps):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"steps={args.steps} out={args.out} stop={args.stop}")
