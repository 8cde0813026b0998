"""Loss curves: 500 steps on real text, the fast step against the naive model in fp32.

    python bench/loss_curves.py --out curves.json
    python bench/loss_curves.py --from bench/results/loss_curves_h200.json --plot docs/figures/loss_curves.svg
    python bench/loss_curves.py --size nano --steps 20 --context 32 --device cpu    # only to see that it runs

The text is documentation that every machine with Python has: the standard library's, as bytes, and this project's. Both
runs start with the same weights, see the same batches in the same order and follow the same schedule of learning rates.
The final loss is the mean over the last 50 steps. The exit status is 1 if it differs by more than 0.5%, or is not a
number.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MOST_APART = 0.005
LAST = 50
MOST_BYTES = 8_000_000
Run = tuple[Callable[..., Any], Callable[[int], None], dict[str, Any]]  # a step, its schedule, and what was checked
RATES = {"max_lr": 6e-4, "min_lr": 6e-5}


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the same model naively in fp32 and with the fast step.")
    parser.add_argument("--size", default="small")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--out", type=Path, help="write the curves as JSON")
    parser.add_argument("--from", dest="source", type=Path, help="use such a file without training")
    parser.add_argument("--plot", type=Path, help="draw them as SVG or PNG")
    arguments = parser.parse_args()
    result = json.loads(arguments.source.read_text()) if arguments.source else train(arguments)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result) + "\n")
    if arguments.plot is not None:
        draw(result, arguments.plot)
    print(summary(result))
    return 0 if result["apart"] <= MOST_APART else 1


def summary(result: dict[str, Any]) -> str:
    finals = ", ".join(f"{name} {loss:.4f}" for name, loss in result["final"].items())
    times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result["seconds"].items())
    check = result["gradients"]
    return (
        f"final loss: {finals}; {result['apart']:.2%} apart\ntraining took: {times}\n"
        f"worst gradient against {check['truth']}: {check['parameter']}, error {check['error']:.2g}, autocast's own "
        f"{check['plain_error']:.2g}"
    )


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    from stepscope.measure.environment import describe_unmeasured, resolve_device

    device = resolve_device(arguments.device)
    batches = make_batches(arguments, torch)
    curves, seconds = {}, {}
    check: dict[str, Any] = {}
    for name, build in (("naive fp32", build_naive), ("fast", build_fast)):
        torch.manual_seed(0)
        step, schedule, found = build(arguments, batches[0].to(device), device)
        check |= found
        started = time.monotonic()
        losses = []
        for number, batch in enumerate(batches):
            schedule(number)
            losses.append(step(batch.to(device)))
        curves[name] = torch.stack(losses).tolist()
        seconds[name] = time.monotonic() - started
    final = {name: statistics.mean(curve[-LAST:]) for name, curve in curves.items()}
    apart = abs(final["fast"] / final["naive fp32"] - 1)
    environment = describe_unmeasured(device)
    return {
        "benchmark": "loss_curves",
        "command": shlex.join(["python", *sys.argv]),
        "size": arguments.size,
        "batch": arguments.batch,
        "context": arguments.context,
        "device": environment.hardware.name,
        "torch": environment.torch,
        "commit": os.environ.get("STEPSCOPE_COMMIT") or environment.commit,
        "seconds": seconds,
        "final": final,
        "apart": apart if apart == apart else 1.0,  # not a number is a failure
        "gradients": check,
        "curves": curves,
    }


def make_batches(arguments: argparse.Namespace, torch: Any) -> list[Any]:
    """Windows of the text at random positions, the same for both runs."""
    text = torch.frombuffer(bytearray(documentation()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    length = arguments.context + 1
    batches = []
    for _ in range(arguments.steps):
        starts = torch.randint(len(text) - length, (arguments.batch,), generator=generator).tolist()
        batches.append(torch.stack([text[start : start + length] for start in starts]).long())
    return batches


def documentation() -> bytes:
    """The topics of `help()`, the standard library with its docstrings, and this project's pages."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [*sorted((library / "pydoc_data").glob("topics.py")), *sorted((ROOT / "docs").glob("*.md"))]
    files += sorted(library.glob("*.py"))
    return b"\n".join(file.read_bytes() for file in files)[:MOST_BYTES]


def build_naive(arguments: argparse.Namespace, _example: Any, device: Any) -> Run:
    from stepscope.nn import AdamW

    model = build_model(arguments, device, fast=False)
    optimizer = AdamW(model.parameters())

    def step(batch: Any) -> Any:
        loss = model.loss(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, schedule_of(optimizer, arguments.steps), {}


def build_fast(arguments: argparse.Namespace, example: Any, device: Any) -> Run:
    import torch

    from stepscope.fast.optimised_step import optimise

    model = build_model(arguments, device, fast=True)
    optimizer = torch.optim.AdamW(model.parameters())
    operations = model.ops
    step = optimise(
        model,
        optimizer,
        example=(example[:, :-1].contiguous(), example[:, 1:].contiguous()),
        loss=lambda module, batch: operations.cross_entropy(module(batch[0]), batch[1]),
        measure=False,
        compiler=arguments.compiler,
    )
    accuracy = step.rungs[-1].accuracy
    assert accuracy is not None, step.rungs
    if step.rungs[-1].status != "kept":
        raise SystemExit(f"error: {step.rungs[-1]}")
    return (
        lambda batch: step((batch[:, :-1], batch[:, 1:])),
        schedule_of(optimizer, arguments.steps),
        accuracy._asdict(),
    )


def build_model(arguments: argparse.Namespace, device: Any, *, fast: bool) -> Any:
    from dataclasses import replace

    from stepscope.kernels import flash_attention
    from stepscope.nn import REFERENCE, TransformerLM
    from stepscope.spec import SIZES
    from stepscope.step.builtin import RECOGNIZED

    shape = SIZES[arguments.size]
    operations = replace(RECOGNIZED, attention=flash_attention) if fast else REFERENCE
    with device:
        return TransformerLM(
            vocab=256,
            d_model=shape.d_model,
            d_ff=shape.d_ff,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            max_context=arguments.context,
            ops=operations,
        )


def schedule_of(optimizer: Any, steps: int) -> Callable[[int], None]:
    from stepscope.nn import cosine_schedule

    def set_rate(number: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = cosine_schedule(number + 1, warmup_steps=min(50, steps // 2), total_steps=steps, **RATES)

    return set_rate


def draw(result: dict[str, Any], path: Path) -> None:
    """The curves, as means over ten steps."""
    from stepscope.findings import Axis, Figure, Point
    from stepscope.render.figures import save

    points = [
        Point(panel="", series=name, x=float(start + 5), y=statistics.mean(curve[start : start + 10]))
        for name, curve in result["curves"].items()
        for start in range(0, len(curve), 10)
    ]
    title = f"{result['size']}, batch {result['batch']}, context {result['context']}, bytes of documentation"
    figure = Figure(
        title=title,
        subtitle=f"{result['device']}; final losses {result['apart']:.2%} apart",
        x=Axis(label="step"),
        y=Axis(label="loss", unit="nats per byte"),
        points=tuple(points),
    )
    save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
