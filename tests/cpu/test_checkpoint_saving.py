"""Saving with torch's own writer, which reports a full disk like any other error."""

import subprocess
import sys
from pathlib import Path

from stepscope.recording.rows.checkpoints import newest

# A limit on file size replaces a full disk in a test: the write fails halfway, in the kernel.
SCRIPT = """
import resource
import signal
import sys
from pathlib import Path

import torch

from stepscope.errors import StepscopeError
from stepscope.recording.rows.checkpoints import save
from stepscope.spec import SIZES, Training, Workload

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
training = Training(workload=Workload(model=SIZES["nano"]))


def save_state(step, count):
    state = {"weights": torch.zeros(count)}
    save(Path(sys.argv[1]), step, training, "", lambda file: torch.save(state, file))


save_state(1, 1000)
try:
    save_state(2, int(sys.argv[2]))
except StepscopeError as error:
    print(error.message)
"""


def test_full_disk_is_named_and_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    # All in one write; and just too large, so that only the end of the archive does not fit.
    for count in (1_000_000, 249_900):
        folder = tmp_path / str(count)
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(folder), str(count)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout == f"cannot write to `{folder}/step-00000002.pt`: File too large\n"
        assert sorted(path.name for path in folder.iterdir()) == ["step-00000001.json", "step-00000001.pt"]
        found = newest(folder)
        assert found is not None
        assert found.manifest.step == 1
