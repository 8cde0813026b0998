"""Compiles the shipped kernels for GPUs that are not present, and checks the result. `make aot`.

ptxas silently decides whether a kernel is fast: it spills registers, serializes asynchronous matmuls, or uses more
shared memory than a GPU has. All of that is visible without a GPU. The results differ between versions of Triton, so
this runs under every supported one; it requires only triton, not torch:

    PYTHONPATH=src python tools/aot.py --only "forward half 128"

Prints one line per kernel, and exits with 1 if one fails a check.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from shipped import Shipped, shipped

NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Limits per program. Ampere's own limit is 166,912; its tiles also serve sm_86 and sm_89, which have less.
MOST_SHARED_BYTES = {80: 101_376, 90: 232_448}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The compiler's result for a kernel, and the checks it fails."""

    name: str
    seconds: float
    registers: int
    spilled_bytes: int
    shared_bytes: int
    tensor_instructions: int
    failures: tuple[str, ...]

    def __str__(self) -> str:
        line = (
            f"{self.name:54s} {self.seconds:5.1f} s  registers {self.registers:3d}  spilled {self.spilled_bytes:5d}"
            f"  shared {self.shared_bytes:6d}  tensor instructions {self.tensor_instructions:3d}"
        )
        return f"{line}  FAILED: {'; '.join(self.failures)}" if self.failures else line


def main() -> int:
    arguments = _parse()
    wanted = [
        entry
        for entry in shipped()
        if all(word in entry.name for word in arguments.only.split()) and (entry.sample or not arguments.sample)
    ]
    if not wanted:
        print(f"error: no shipped kernel's name contains all of `{arguments.only}`", file=sys.stderr)
        return 2
    failed = 0
    for verdict in _judge_all([entry.name for entry in wanted], arguments.jobs):
        print(verdict, flush=True)
        failed += bool(verdict.failures)
    print(f"{len(wanted)} kernels with triton {triton.__version__}, {failed} failed")
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compile the shipped kernels ahead of time and check the result.")
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="only kernels whose names contain all of these words"
    )
    parser.add_argument("--sample", action="store_true", help="only the dozen kernels that `make test` compiles")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of parallel compilers")
    return parser.parse_args()


def _judge_all(names: list[str], jobs: int) -> Iterable[Verdict]:
    """Compile in order. Kernels are passed by name, because they cannot be pickled."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(judge, names)


def judge(name: str) -> Verdict:
    """Compile the kernel of this name and check it."""
    (entry,) = (entry for entry in shipped() if entry.name == name)
    started = time.monotonic()
    compiled = _compile(entry)
    log, assembly = _look_at(compiled, entry.arch)
    spilled = int(_find(r"(\d+) bytes spill stores", log))
    shared = compiled.metadata.shared
    products = len(re.findall(rf"\b{entry.product}\b", assembly))
    failures = []
    if spilled > entry.most_spilled:
        failures.append(f"spills more than {entry.most_spilled} bytes")
    if "serialized" in log and not entry.may_serialize:
        failures.append("matmuls are serialized")
    if shared > MOST_SHARED_BYTES[entry.arch]:
        failures.append(f"uses more than {MOST_SHARED_BYTES[entry.arch]} bytes of shared memory")
    if not products:
        failures.append(f"has no {entry.product} instruction")
    return Verdict(
        name=name,
        seconds=time.monotonic() - started,
        registers=int(_find(r"Used (\d+) registers", log)),
        spilled_bytes=spilled,
        shared_bytes=shared,
        tensor_instructions=products,
        failures=tuple(failures),
    )


def _compile(entry: Shipped) -> Any:
    names = entry.kernel.arg_names
    places = (place if isinstance(place, tuple) else (names.index(place),) for place in entry.aligned)
    attributes = {place: [["tt.divisibility", 16]] for place in places}
    if entry.gluon:
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source
    source = Source(entry.kernel, entry.signature, entry.constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", entry.arch, 32), options=entry.options)


def _look_at(compiled: Any, arch: int) -> tuple[str, str]:
    """Return what ptxas reports about the kernel, and its machine code as text."""
    gpu = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(compiled.asm["ptx"])
        cubin.write_bytes(compiled.asm["cubin"])
        log = _run("ptxas", "-v", "--gpu-name", gpu, str(ptx), "-o", str(Path(folder, "again.cubin"))).stderr
        return log, _run("nvdisasm", str(cubin)).stdout


def _run(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(NVIDIA_TOOLS / tool), *arguments], capture_output=True, text=True, check=True)


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, f"ptxas no longer reports {pattern!r}"
    return found[1]


if __name__ == "__main__":
    sys.exit(main())
