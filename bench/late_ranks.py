"""Whether `stepscope run` names the rank that the others wait for, and why: real ranks, one of which is late.

    python bench/late_ranks.py [--ranks 2 4] [--out FILE.jsonl] [--keep DIR]

For each number of ranks, one rank sleeps in its dataset, sleeps in the loop's own code, or trains on longer sequences.
This file is also the training script: DDP with gloo on CPUs, under torchrun and `stepscope run`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REASONS = {"loader": "input", "host": "host", "work": "work"}  # by how a rank is made late
SLEEP_S = 0.06


def train(late: int, how: str) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_late = dist.get_rank() == late

    class Sequences(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 60

        def __getitem__(self, _: int) -> torch.Tensor:
            if is_late and how == "loader":
                time.sleep(SLEEP_S)
            return torch.randn(512 if is_late and how == "work" else 32, 64)

    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    model = nn.parallel.DistributedDataParallel(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in DataLoader(Sequences(), batch_size=None):
        loss = model(batch.unsqueeze(0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if is_late and how == "host":
            time.sleep(SLEEP_S)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for ranks in given.ranks:
            for how in REASONS:
                folder = (given.keep or Path(scratch)) / f"{ranks}-{how}"
                row = record(ranks, ranks - 1, how, folder.resolve())
                print(json.dumps(row), flush=True)
                if given.out:
                    with given.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")


def record(ranks: int, late: int, how: str, folder: Path) -> dict[str, Any]:
    import stepscope

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "stepscope", "run", "--stop", "--force", "--out", str(folder), __file__, str(late), how]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    row: dict[str, Any] = {"ranks": ranks, "late": late, "how": how, "exit": done.returncode}
    if not (folder / "rank-0").exists():
        return {**row, "stderr": done.stderr[-1000:]}
    times = stepscope.load(folder).rank_times
    straggler = times.straggler if times is not None else None
    if straggler is None:
        return {**row, "named": None}
    is_right = (straggler.lateness.rank, straggler.reason) == (late, REASONS[how])
    finding = next((one for one in stepscope.load(folder).findings if one.code == "SS030"), None)
    return {
        **row,
        "named": straggler.lateness.rank,
        "reason": straggler.reason,
        "is_right": is_right,
        "finding": finding.title if finding else None,
        "why": finding.evidence if finding else None,
    }


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(int(sys.argv[1]), sys.argv[2])
    else:
        main()
