"""The overhead of each data-parallel strategy on one GPU, with nothing to communicate: NCCL, one rank.

    python bench/parallel_gpu.py --out parallel_gpu.jsonl

Collectives of one rank move nothing, so what a step takes beyond the bare model is the strategy's own overhead: hooks,
copies into buckets, gathering. The steps of all strategies alternate in rotating order. All start from the same weights
and are checked against the bare model after two steps first. One row per strategy; times are from CUDA events.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from parallel_rank import ALONE, NAMES, Way, build_way
from stepscope.explain.statistics import summarise
from stepscope.measure.environment import describe
from stepscope.nn import TransformerLM
from stepscope.parallel.group import join
from stepscope.spec import SIZES

MOST_APART = 1e-4  # a tenth of what one AdamW step moves a parameter
PEERS = {
    "bucketed": ("torch DDP", "torch DDP, bucket view"),
    "ShardedOptimizer": ("ZeroRedundancyOptimizer", "ZeroRedundancyOptimizer, bucket view"),
    "FSDP": ("fully_shard",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", default="small")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    os.environ.setdefault("LOCAL_RANK", "0")
    with (
        tempfile.TemporaryDirectory() as folder,
        join(backend="nccl", timeout_s=120, meeting=Path(folder) / "meet", rank=0, world=1),
    ):
        torch.cuda.set_device(0)
        rows = _measure(options)
    common = {
        "size": options.size,
        "batch": options.batch,
        "context": options.context,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": describe(torch.device("cuda", 0), ()).commit,
        "command": shlex.join(["python", "bench/parallel_gpu.py", *sys.argv[1:]]),
    }
    with options.out.open("a") as file:
        for row in rows:
            file.write(json.dumps(common | row) + "\n")
            print(
                f"{row['name']:40} {row['step_ms']:8.2f} ms  {row['over_bare']:.3f} × bare  peer {row['ratio'] or '':}"
            )


def _measure(options: argparse.Namespace) -> list[dict[str, object]]:
    shape = SIZES[options.size]
    tokens_BL = torch.randint(shape.vocab, (options.batch, options.context + 1), device="cuda")
    ways: dict[str, Way] = {}
    reference: list[Tensor] = []
    for name in NAMES:
        ways[name] = build_way(name, _build_model(options))
        for _ in range(2):
            _step(ways[name], tokens_BL)
        found = [param.double() for param in ways[name].whole()]
        if name == ALONE:
            reference = found
        apart = max(float((one - other).abs().max()) for one, other in zip(found, reference, strict=True))
        print(f"{name}: differs from the bare model by at most {apart:.2g} after two steps", flush=True)
        assert apart < MOST_APART, f"{name} trains a different model"
    samples: dict[str, list[float]] = {name: [] for name in NAMES}
    for number in range(options.rounds + 3):
        turn = number % len(NAMES)
        for name in NAMES[turn:] + NAMES[:turn]:
            elapsed_ms = _time(ways[name], tokens_BL)
            if number >= 3:
                samples[name].append(elapsed_ms)
    return [_row(name, samples) for name in NAMES]


def _row(name: str, samples: dict[str, list[float]]) -> dict[str, object]:
    own = summarise(samples[name])
    peers = [summarise(samples[peer]).median for peer in PEERS.get(name, ())]
    return {
        "name": name,
        "step_ms": own.median,
        "p20_ms": own.p20,
        "p80_ms": own.p80,
        "over_bare": own.median / summarise(samples[ALONE]).median,
        "ratio": min(peers) / own.median if peers else None,
    }


def _time(way: Way, tokens_BL: Tensor) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    _step(way, tokens_BL)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def _step(way: Way, tokens_BL: Tensor) -> None:
    way.optimizer.zero_grad()
    logits_BLV = way.model(tokens_BL[:, :-1])
    loss = nn.functional.cross_entropy(logits_BLV.flatten(0, 1), tokens_BL[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    way.finish()
    way.optimizer.step()


def _build_model(options: argparse.Namespace) -> TransformerLM:
    torch.manual_seed(0)
    shape = SIZES[options.size]
    with torch.device("cuda"):
        return TransformerLM(
            vocab=shape.vocab,
            d_model=shape.d_model,
            d_ff=shape.d_ff,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            max_context=options.context,
        )


if __name__ == "__main__":
    main()
