"""CPU time of an attention call, and the compile time of the first one.

The work on the device is short, so that the calls are CPU-bound. First calls start with an empty Triton cache.

    python bench/attention_host_time.py                                 # on a GPU: hopper or triton, compared with SDPA
    python bench/attention_host_time.py --device cpu --backend tiled    # only to see that it runs
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

ROUNDS, CALLS = 5, 200
SHAPE = (8, 16, 256, 64)  # batch, heads, length, head dim


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU time of an attention call.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="auto")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        print(json.dumps(measure(arguments.device, arguments.backend), indent=1))
    return 0


def measure(device: str, backend: str) -> dict[str, object]:
    import torch

    from stepscope.kernels import flash_attention

    if device == "cuda" and not torch.cuda.is_available():
        print("error: no CUDA GPU found", file=sys.stderr)
        raise SystemExit(2)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    leaves = [torch.randn(SHAPE, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    q, k, v = (x.detach() for x in leaves)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def forward() -> object:
        return flash_attention(q, k, v, causal=True, backend=backend)

    def sdpa() -> object:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    first_forward_s = time_s(forward, wait)
    out = flash_attention(leaves[0], leaves[1], leaves[2], causal=True, backend=backend)
    do = torch.randn_like(out)

    def backward() -> object:
        return torch.autograd.grad(out, leaves, do, retain_graph=True)

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "backend": backend,
        "first_forward_s": round(first_forward_s, 2),
        "first_backward_s": round(time_s(backward, wait), 2),
        "forward_us": host_us(forward, wait),
        "backward_us": host_us(backward, wait),
        "sdpa_forward_us": host_us(sdpa, wait),
    }


def time_s(call: Callable[[], object], wait: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - started


def host_us(call: Callable[[], object], wait: Callable[[], object]) -> float:
    """The median of rounds; within one, the CPU does not wait for the device."""
    rounds = []
    for _ in range(ROUNDS):
        wait()
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - started) / CALLS * 1e6)
    return round(statistics.median(rounds), 1)


if __name__ == "__main__":
    sys.exit(main())
