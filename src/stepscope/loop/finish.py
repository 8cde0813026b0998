"""Starts the process that turns a recorded loop into a page, and waits for it when the script ends.

It outlives the script if it must: a script may end with `os._exit`, or be killed.
"""

import os
import subprocess
import sys
import time

from stepscope.loop.messages import TERMINAL
from stepscope.loop.place import RunPlace

# Variables that would make a child of a rank look like a rank.
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_GRACE_S = 2.0


class Finisher:
    def __init__(self, place: RunPlace, rank: int) -> None:
        self._place = place
        self._rank = rank
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Its messages go to standard error. It does not get Ctrl-C, which is for the script."""
        environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "stepscope.api.finish_run",
                str(self._place.folder),
                "--rank",
                str(self._rank),
            ],
            stdin=subprocess.DEVNULL,
            stdout=TERMINAL,
            stderr=TERMINAL,
            env=environment,
            cwd=self._place.folder,
            start_new_session=True,
        )

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self) -> int:
        """Wait until the page is written. Ctrl-C ends it."""
        assert self._process is not None, "`start` comes first"
        try:
            return self._process.wait()
        except KeyboardInterrupt:
            self.stop()
            raise

    def stop(self) -> None:
        assert self._process is not None, "`start` comes first"
        self._process.terminate()
        deadline = time.monotonic() + _GRACE_S
        while self.is_running and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.is_running:
            self._process.kill()
