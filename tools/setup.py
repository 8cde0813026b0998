"""Makes the virtual environment that every `make` target uses, or sees in a moment that it is right.

Standard library only, run by the Python that `tools/python.sh` found. Four stages: the environment, torch,
the other packages, stepscope itself. Torch comes first and alone because it is most of the download.

What must hold: the environment is right, or its stamp does not say so. `stepscope.stamp` inside it says
`unfinished` before anything changes and `ready` after everything succeeded, so a set-up that was cut short
(Ctrl-C, a full disk) is done again from the start: going on would not do, because pip takes a package that it
was stopped in the middle of for installed. The stamp compares contents and not times, because a checkout
touches files without changing them.

stepscope is installed with `--no-deps --no-build-isolation`: its dependencies were installed the line before,
and build isolation would fetch a setuptools that no constraint pins and that a machine without an index
cannot fetch at all. Dependency groups are read here because the pip of Python 3.11 does not know them.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
STAMP = "stepscope.stamp"
# Whoever brings their own torch brings what it was built against too.
TORCH_STACK = ("torch", "triton", "numpy")


class SetupError(Exception):
    """What went wrong, and a hint that is a command to type."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"error: {message}\nhint: {hint}")


def main() -> int:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, _interrupt)
    os.chdir(ROOT)
    try:
        with_lock(arguments)
    except SetupError as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        say("\nset-up interrupted; the next `make` starts it again")
        return 130
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Makes the virtual environment of this checkout.")
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="where (default: .venv)")
    parser.add_argument("--torch", default="", help="`pinned` or `installed` (default: as it was, else pinned)")
    parser.add_argument(
        "--deps", default="", help="`all`, `none` or the packages to install (default: as it was, else all)"
    )
    return parser.parse_args()


def with_lock(arguments: argparse.Namespace) -> None:
    """Two `make` in one checkout take turns. The lock is on the folder itself: no lock file stays behind."""
    folder = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("waiting for another set-up of this folder ...")
        fcntl.flock(folder, fcntl.LOCK_EX)
    except OSError:
        pass  # some network file systems lock no folders; then nobody takes turns
    prepare(ROOT / arguments.venv, torch=arguments.torch, deps=" ".join(arguments.deps.split()))


def prepare(venv: Path, *, torch: str, deps: str) -> None:
    """Brings the environment to what is wanted: not at all, in place, or from the start."""
    there = read_stamp(venv)
    torch = torch or there.get("torch", "pinned")
    deps = deps or there.get("deps", "all")
    if torch not in ("pinned", "installed"):
        raise SetupError(f"TORCH is `pinned` or `installed`, not `{torch}`", "make run TORCH=installed")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    identity = {
        "venv": str(venv),
        "python": sys.executable,
        "version": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch": torch,
    }
    wanted = identity | {"deps": deps, "inputs": digest_inputs(project), "state": "ready"}
    python = venv / "bin" / "python"
    if there == wanted and python.exists():
        return

    started = time.monotonic()
    own_torch = check_installed_torch(project) if torch == "installed" else ""
    in_place = there.items() >= (identity | {"state": "ready"}).items() and python.exists()
    if not in_place:
        discard(venv)
    venv.mkdir(parents=True, exist_ok=True)
    write_stamp(venv, wanted | {"state": "unfinished"})
    if in_place:
        say(f"the packages asked for changed: updating {venv.name} in place")
    else:
        say(f"[1/4] making {venv.name} with Python {sys.version.split()[0]} ({sys.executable})")
        create(venv, see_installed=bool(own_torch))
    install(python, project, own_torch=own_torch, deps=deps)
    write_stamp(venv, wanted)
    say(f"ready after {time.monotonic() - started:.0f} s")


def install(python: Path, project: dict[str, Any], *, own_torch: str, deps: str) -> None:
    """Stages two to four."""
    constraints = CONSTRAINTS
    requirements = list_requirements(project)
    if own_torch:
        say(f"[2/4] keeping the installed torch {own_torch}")
        constraints = python.parent.parent / "constraints.txt"
        installed = list_installed()
        constraints.write_text(constrain_to(installed))
        keep = {name for name in TORCH_STACK if name in installed} | {"torch", "triton"}
        requirements = [line for line in requirements if name_of(line) not in keep]
    else:
        version = read_pins()["torch"]
        stack = [line for line in requirements if name_of(line) in TORCH_STACK]
        title = f"[2/4] installing torch {version} (one to three minutes; CUDA: about 3 GB)"
        hint = "the same command again once the cause is gone, or with a torch of your own:\n"
        hint += "  make run TORCH=installed PYTHON=/path/to/python"
        run_stage(title, pip(python, "-c", str(constraints), *stack), hint=hint)
    if deps != "all":
        requirements = [] if deps == "none" else deps.split()
    requirements += project["build-system"]["requires"]
    names = " ".join(name_of(line) for line in requirements)
    hint = "the same command again once the cause is gone; for a machine without a package index, elsewhere:\n"
    hint += f"  pip download -c constraints.txt -d wheels {names}\n"
    hint += "and here PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels before the command (DEPS in `make help` for fewer)"
    title = f"[3/4] installing {len(requirements)} packages and what they need (about a minute)"
    run_stage(title, pip(python, "-c", str(constraints), *requirements), hint=hint)
    itself = pip(python, "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    run_stage("[4/4] installing stepscope from this folder", itself, hint="make clean, then again")
    if deps != "all":
        say_what_is_missing(python)


def list_requirements(project: dict[str, Any]) -> list[str]:
    """What the package, the group `dev` and the extras named there ask for, references to itself resolved."""
    name, extras = project["project"]["name"], project["project"].get("optional-dependencies", {})
    groups = project["dependency-groups"]
    waiting: list[str | dict[str, str]] = [*project["project"]["dependencies"], *groups["dev"]]
    found: list[str] = []
    while waiting:
        line = waiting.pop(0)
        if isinstance(line, dict):
            waiting += groups[line["include-group"]]
        elif name_of(line) != name:
            found.append(line)
        elif bracket := re.search(r"\[(.*?)\]", line):
            waiting += [entry for extra in bracket[1].split(",") for entry in extras[extra.strip()]]
    return list(dict.fromkeys(found))


def check_installed_torch(project: dict[str, Any]) -> str:
    """The version of the torch that this Python imports, if it is in the range of pyproject.toml."""
    (wanted,) = (line for line in list_requirements(project) if name_of(line) == "torch")
    show = [sys.executable, "-c", "import torch; print(torch.__version__)"]
    answer = subprocess.run(show, capture_output=True, text=True, check=False)
    other = f"make run TORCH=installed PYTHON=/path/to/python    # one that has {wanted}\n"
    other += "  or: make run TORCH=pinned    # downloads the pinned torch"
    if answer.returncode:
        reason = (answer.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SetupError(f"`{sys.executable}` cannot import torch: {reason}", other)
    version = answer.stdout.split()[-1]
    low, high = (tuple(map(int, bound)) for bound in re.findall(r"(\d+)\.(\d+)", wanted))
    # Only two numbers: a vendor's 2.11.0a0+abc is a 2.11, though the rules for versions put it before that.
    major_minor = tuple(map(int, version.split(".")[:2]))
    if not low <= major_minor < high:
        raise SetupError(f"torch `{version}` of `{sys.executable}` is out of range: {wanted}", other)
    return version


def list_installed() -> dict[str, str]:
    return {name_of(entry.name): entry.version for entry in importlib.metadata.distributions() if entry.name}


def constrain_to(installed: dict[str, str]) -> str:
    """Pins for what this Python lacks, and torch and its stack as they are; whatever else it has may stay."""
    pins = {name: version for name, version in read_pins().items() if name not in installed}
    pins |= {name: installed[name] for name in TORCH_STACK if name in installed}
    return "".join(f"{name}=={version}\n" for name, version in pins.items())


def create(venv: Path, *, see_installed: bool) -> None:
    """One with pip: by venv, by virtualenv, or by this Python's pip (Debian splits ensurepip off)."""
    options = ["--system-site-packages"] if see_installed else []
    python = str(venv / "bin" / "python")
    bare = [sys.executable, "-m", "venv", "--without-pip", *options, str(venv)]
    ways = [
        [[sys.executable, "-m", "venv", *options, str(venv)]],
        [[sys.executable, "-m", "virtualenv", "--quiet", *options, str(venv)]],
        [bare, [sys.executable, "-m", "pip", "-q", "--python", python, "install", "pip"]],
    ]
    for way in ways:
        if all(succeeds(command) for command in way) and succeeds([python, "-m", "pip", "--version"]):
            break
    else:
        message = f"`{sys.executable}` cannot make a virtual environment: no ensurepip, virtualenv or pip"
        hint = "apt-get install python3-venv    # Debian and Ubuntu, as root\n"
        hint += "  or: make run PYTHON=/path/to/another/python"
        raise SetupError(message, hint)
    if see_installed and sys.prefix != sys.base_prefix:
        # Made from an environment, it would see the packages of the Python below both and not its parent's.
        (packages,) = (venv / "lib").glob("python*/site-packages")
        lines = [f"import site; site.addsitedir({folder!r})" for folder in site.getsitepackages()]
        (packages / "stepscope_parent.pth").write_text("\n".join(lines) + "\n")


def discard(venv: Path) -> None:
    """Empties an environment that we made, but for its stamp; one that somebody else made is theirs."""
    if not venv.exists() or not any(venv.iterdir()):
        return
    if not (venv / STAMP).exists():
        raise SetupError(f"`{venv}` was not made by `make`, so it is left alone", "make clean    # removes .venv")
    say(f"making {venv.name} anew: it is unfinished, was moved, or was made by another Python or TORCH")
    for entry in venv.iterdir():
        if entry.name == STAMP:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def say_what_is_missing(python: Path) -> None:
    """With DEPS some packages are absent on purpose: named once, so that no later error surprises."""
    check = subprocess.run([python, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    for line in check.stdout.splitlines():
        if line.startswith("stepscope "):
            say(f"  note: {line}")


def pip(python: Path, *arguments: str) -> list[str]:
    return [
        str(python),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        "-q",
        "install",
        *arguments,
    ]


def run_stage(title: str, command: list[str], *, hint: str) -> None:
    """Runs one command under its title. What pip says is shown if it fails; a terminal sees the seconds."""
    say(f"{title} ...")
    started = time.monotonic()
    clear = "\r\033[K" if sys.stderr.isatty() else ""
    environment = os.environ | {"PIP_USER": "0"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        complaints = None
        try:
            while complaints is None:
                try:
                    _, complaints = process.communicate(timeout=1)
                except subprocess.TimeoutExpired:
                    if clear:
                        sys.stderr.write(f"{clear}  {time.monotonic() - started:.0f} s")
                        sys.stderr.flush()
        except KeyboardInterrupt:
            process.terminate()
            raise
    sys.stderr.write(clear)
    if process.returncode:
        # Only the end, which has the reason. Warnings too: a refused connection is one.
        say("\n".join(complaints.splitlines()[-20:]))
        raise SetupError(f"this stage failed: {title}", hint)


def succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def read_pins() -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines())
    return {name_of(line): line.split("==")[1] for line in lines if line}


def read_stamp(venv: Path) -> dict[str, str]:
    try:
        lines = (venv / STAMP).read_text().splitlines()
    except FileNotFoundError:
        return {}
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def write_stamp(venv: Path, stamp: dict[str, str]) -> None:
    (venv / STAMP).write_text("".join(f"{key}={value}\n" for key, value in stamp.items()))


def digest_inputs(project: dict[str, Any]) -> str:
    """Changes when the installed set would: a new lint rule in pyproject.toml is no reason to run pip."""
    relevant = [project.get(table) for table in ("build-system", "project", "dependency-groups")]
    relevant += [project.get("tool", {}).get("setuptools"), read_pins(), Path(__file__).read_text()]
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def name_of(requirement: str) -> str:
    """`Some_Package[extra]>=1` -> `some-package`, the spelling under which names compare equal."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement)[0]).lower()


def say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
