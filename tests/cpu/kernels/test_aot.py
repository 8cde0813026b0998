"""A dozen of the shipped kernels, compiled for GPUs that are not present. `make aot` compiles all and lists the
checks.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_sampled_kernels_pass_the_compiler_checks(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "aot.py"), "--sample"]
    # A separate cache, so that kernels are compiled now, and compiled kernels, not interpreted ones.
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert "12 kernels" in result.stdout.splitlines()[-1]
