"""The compiled way to fake CUDA: a small C++ library, built once per PyTorch version into the cache directory.

It uses public headers only, so the compiler knows the layout of PyTorch's objects, and any version with the same names
works.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from stepscope.files import cache_folder

SOURCE = Path(__file__).with_name("device.cpp")
BUILD_S = 120


def why_not() -> str:
    """Why the library cannot be built here; empty if it can."""
    if _compiler() is None:
        return "no C++ compiler: `g++` is not installed"
    if not (_torch_folder() / "include" / "c10").is_dir():
        return "PyTorch's headers are not installed"
    try:
        _library().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"cannot write to the cache directory: {error}"
    if not _library().exists() and not os.access(_library().parent, os.W_OK):
        return f"cannot write to the cache directory: `{_library().parent}`"
    return ""


def install() -> None:
    """Build the library unless the cache has it, load it, and replace the guard and the hooks. OSError if that
    fails."""
    ctypes.CDLL(str(build())).stepscope_enable_fake_cuda()


def build() -> Path:
    """The path of the library. It is renamed into place when complete, so processes that build it at once agree."""
    target = _library()
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "device.so"
        _compile(made)
        made.replace(target)
    return target


def _library() -> Path:
    content = SOURCE.read_bytes()
    key = f"{torch.__version__} {torch.compiled_with_cxx11_abi()} {platform.machine()}".encode()
    digest = hashlib.sha256(content + key).hexdigest()[:16]
    return cache_folder() / "fake_cuda" / f"device-{digest}.so"


def _compile(made: Path) -> None:
    torch_folder = _torch_folder()
    command = [
        _compiler() or "g++",
        *("-shared", "-fPIC", "-O1", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"),
        *(f"-I{torch_folder / 'include'}", str(SOURCE), "-o", str(made)),
        *(f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_S)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines()
        raise OSError(f"the C++ compiler failed: {lines[0][:200] if lines else error.returncode}") from None
    except subprocess.TimeoutExpired:
        raise OSError(f"the C++ compiler took longer than {BUILD_S} s") from None


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def _torch_folder() -> Path:
    return Path(torch.__file__).parent
