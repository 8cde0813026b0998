"""Fake CUDA tensors on any machine: with autograd, autocast and optimizers as on a GPU, and without one.

A fake tensor says that it is on `cuda`, and PyTorch then asks CUDA about streams and devices, which fails without a
GPU, and on builds without CUDA aborts. Two ways give it objects that answer: `extension`, a small library that is
compiled once, and `vtables`, which needs no compiler but knows the layout of PyTorch's objects. Each is tried in
another process first, once per version of PyTorch: there a crash is an error, and here it would be the end.

A GPU that is there is hidden from this process, so that it does the same with and without one.
"""

import hashlib
import os
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args

from stepscope.errors import StepscopeError
from stepscope.files import cache_folder, write_atomically

Way = Literal["extension", "vtables"]
WAYS: tuple[Way, ...] = get_args(Way)
TEST_S = 180
_enabled: Way | None = None


def enable(way: Way | None = None) -> Way:
    """Make fake CUDA tensors work in this process, until it ends; return how. StepscopeError if no way works here."""
    if _enabled is not None:
        return _enabled
    reasons = []
    for one in WAYS if way is None else (way,):
        reason = why_not(one)
        if not reason:
            return install(one)
        reasons.append(f"{one}: {reason}")
    import torch

    raise StepscopeError(
        f"steps cannot be simulated with PyTorch {torch.__version__}",
        detail="\n".join(reasons),
        hint="pip install 'torch>=2.11,<2.14', or install g++",
    )


def install(way: Way) -> Way:
    """Enable a way without a test."""
    global _enabled
    _hide_gpus()
    _load(way).install()
    _enabled = way
    return way


def why_not(way: Way) -> str:
    """Why a way does not work here; empty if it does. A test that passed is remembered in the cache directory."""
    reason = str(_load(way).why_not())
    if reason:
        return reason
    passed = cache_folder() / "fake_cuda" / f"{way}-{_digest()}.passed"
    if passed.exists():
        return ""
    reason = _test(way)
    if not reason:
        with suppress(OSError):  # a cache that cannot be written to costs a test per process
            passed.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(passed, b"")
    return reason


def _load(way: Way) -> ModuleType:
    from stepscope.planner.fake_cuda import extension, vtables

    return extension if way == "extension" else vtables


def _hide_gpus() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise StepscopeError(
            "steps cannot be simulated in a process that uses a GPU",
            detail="PyTorch has initialized CUDA here, and a simulation hides the GPU from its process",
            hint="simulate in a new process",
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _test(way: Way) -> str:
    """Run the test in another process; return what went wrong there."""
    command = [sys.executable, "-m", "stepscope.planner.fake_cuda.self_test", way]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TEST_S,
            check=False,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"its test took longer than {TEST_S} s"
    if done.returncode == 0 and done.stdout.strip() == "ok":
        return ""
    lines = (done.stdout + done.stderr).strip().splitlines()
    what = f"was killed by signal {-done.returncode}" if done.returncode < 0 else "failed"
    return f"its test {what}" + (f": {lines[-1][:200]}" if lines else "")


def _digest() -> str:
    """A digest of everything that the result of a test depends on."""
    import torch

    folder = Path(__file__).parents[1]
    content = b"".join(path.read_bytes() for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.cpp"))))
    versions = f"{torch.__version__} {torch.__file__} {sys.version} {platform.platform()}"
    return hashlib.sha256(content + versions.encode()).hexdigest()[:16]
