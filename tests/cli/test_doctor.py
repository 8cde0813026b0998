"""`stepscope doctor` and the help pages."""

import json
from pathlib import Path

from tests.cli.command import stepscope


def test_every_line_has_a_verdict_and_problems_have_advice(tmp_path: Path) -> None:
    done = stepscope(tmp_path, "doctor", "--format", "json")
    checks = {row["subject"]: row for row in json.loads(done.stdout)["rows"]}
    assert {"python", "cpu", "memory", "torch", "triton", "cuda", "nsys", "ncu", "counters"} <= set(checks)
    for check in checks.values():
        assert check["verdict"] in ("fine", "limited", "broken")
        assert check["advice"] or check["verdict"] == "fine"
    assert done.returncode == (1 if any(c["verdict"] == "broken" for c in checks.values()) else 0)


def test_a_profiler_that_does_not_run_is_broken(tmp_path: Path) -> None:
    (tmp_path / "ncu").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "ncu").chmod(0o755)
    done = stepscope(tmp_path, "doctor", "--format", "json", PATH=f"{tmp_path}:/usr/bin:/bin")
    (ncu,) = (row for row in json.loads(done.stdout)["rows"] if row["subject"] == "ncu")
    assert ncu["verdict"] == "broken"
    assert done.returncode == 1


def test_help_names_the_verbs_and_every_setting(tmp_path: Path) -> None:
    from stepscope.spec import SETTINGS

    overview = stepscope(tmp_path, "--help")
    assert overview.returncode == 0
    assert "bench" in overview.stdout
    assert "doctor" in overview.stdout
    page = stepscope(tmp_path, "bench", "--help").stdout
    for name in SETTINGS:
        assert "--" + name.replace("_", "-") in page
    assert stepscope(tmp_path, "--version").stdout.startswith("stepscope ")
