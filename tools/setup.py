"""Creates the virtual environment that all `make` targets use, or returns at once if it is up to date.

Uses only the standard library, and is run by the Python that `tools/python.sh` found. There are four stages: the
environment, torch, the other packages, and stepscope itself. Torch comes first because it is most of the download.

`stepscope.stamp` in the environment is `unfinished` before anything changes and `ready` after everything succeeded. An
interrupted setup (Ctrl-C, a full disk) therefore starts over; resuming is impossible, because pip considers a
half-installed package installed. The stamp compares contents instead of times, because a checkout touches files without
changing them.

stepscope is installed with `--no-deps --no-build-isolation`: its dependencies are already installed, and build
isolation would download an unpinned setuptools, which fails without a package index. Dependency groups are read here
because the pip of Python 3.11 does not support them.
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
# These come with torch if the user brings their own.
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
        say("\nsetup interrupted; the next `make` starts it again")
        return 130
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Create the virtual environment for this checkout.")
    parser.add_argument(
        "--venv", type=Path, default=Path(".venv"), help="directory of the environment (default: .venv)"
    )
    parser.add_argument("--torch", default="", help="`pinned` or `installed` (default: unchanged, or pinned)")
    parser.add_argument(
        "--deps", default="", help="`all`, `none` or the packages to install (default: unchanged, or all)"
    )
    return parser.parse_args()


def with_lock(arguments: argparse.Namespace) -> None:
    """Run the setup under a lock, so that two `make` take turns. The directory itself is locked: no lock file
    remains."""
    folder = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("waiting for another setup in this directory ...")
        fcntl.flock(folder, fcntl.LOCK_EX)
    except OSError:
        pass  # some network file systems cannot lock directories
    prepare(ROOT / arguments.venv, torch=arguments.torch, deps=" ".join(arguments.deps.split()))


def prepare(venv: Path, *, torch: str, deps: str) -> None:
    """Bring the environment up to date: do nothing, update it in place, or create it from scratch."""
    there = read_stamp(venv)
    torch = torch or there.get("torch", "pinned")
    deps = deps or there.get("deps", "all")
    if torch not in ("pinned", "installed"):
        raise SetupError(f"TORCH must be `pinned` or `installed`, got `{torch}`", "make run TORCH=installed")
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
        say(f"the requested packages changed: updating {venv.name}")
    else:
        say(f"[1/4] creating {venv.name} with Python {sys.version.split()[0]} ({sys.executable})")
        create(venv, see_installed=bool(own_torch))
    install(python, project, own_torch=own_torch, deps=deps)
    write_stamp(venv, wanted)
    say(f"ready after {time.monotonic() - started:.0f} s")


def install(python: Path, project: dict[str, Any], *, own_torch: str, deps: str) -> None:
    """Run stages two to four."""
    constraints = CONSTRAINTS
    requirements = list_requirements(project)
    if own_torch:
        say(f"[2/4] using the installed torch {own_torch}")
        constraints = python.parent.parent / "constraints.txt"
        installed = list_installed()
        constraints.write_text(constrain_to(installed))
        keep = {name for name in TORCH_STACK if name in installed} | {"torch", "triton"}
        requirements = [line for line in requirements if name_of(line) not in keep]
    else:
        version = read_pins()["torch"]
        stack = [line for line in requirements if name_of(line) in TORCH_STACK]
        title = f"[2/4] installing torch {version} (one to three minutes; CUDA: about 3 GB)"
        hint = "fix the cause and run the same command again, or use your own torch:\n"
        hint += "  make run TORCH=installed PYTHON=/path/to/python"
        run_stage(title, pip(python, "-c", str(constraints), *stack), hint=hint)
    if deps != "all":
        requirements = [] if deps == "none" else deps.split()
    requirements += project["build-system"]["requires"]
    names = " ".join(name_of(line) for line in requirements)
    hint = "fix the cause and run the same command again. Without a package index, run this on another machine:\n"
    hint += f"  pip download -c constraints.txt -d wheels {names}\n"
    hint += "then copy `wheels` here and prefix the command with PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels"
    hint += " (to install fewer packages, see DEPS in `make help`)"
    title = f"[3/4] installing {len(requirements)} packages and their dependencies (about a minute)"
    run_stage(title, pip(python, "-c", str(constraints), *requirements), hint=hint)
    itself = pip(python, "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    run_stage("[4/4] installing stepscope from this directory", itself, hint="make clean, then try again")
    if deps != "all":
        say_what_is_missing(python)


def list_requirements(project: dict[str, Any]) -> list[str]:
    """The requirements of the package, the group `dev` and its extras, with references to the package itself
    resolved."""
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
    """The version of torch in this Python. Raises SetupError if it is outside the range in pyproject.toml."""
    (wanted,) = (line for line in list_requirements(project) if name_of(line) == "torch")
    show = [sys.executable, "-c", "import torch; print(torch.__version__)"]
    answer = subprocess.run(show, capture_output=True, text=True, check=False)
    other = f"make run TORCH=installed PYTHON=/path/to/python    # a Python with {wanted}\n"
    other += "  or: make run TORCH=pinned    # downloads the pinned torch"
    if answer.returncode:
        reason = (answer.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SetupError(f"`{sys.executable}` cannot import torch: {reason}", other)
    version = answer.stdout.split()[-1]
    low, high = (tuple(map(int, bound)) for bound in re.findall(r"(\d+)\.(\d+)", wanted))
    # Compare major and minor only: a vendor's 2.11.0a0+abc counts as 2.11, although PEP 440 sorts it before.
    major_minor = tuple(map(int, version.split(".")[:2]))
    if not low <= major_minor < high:
        raise SetupError(f"torch `{version}` in `{sys.executable}` is unsupported; expected {wanted}", other)
    return version


def list_installed() -> dict[str, str]:
    return {name_of(entry.name): entry.version for entry in importlib.metadata.distributions() if entry.name}


def constrain_to(installed: dict[str, str]) -> str:
    """Constraints: pins for packages that this Python lacks, and the installed versions of torch and its stack."""
    pins = {name: version for name, version in read_pins().items() if name not in installed}
    pins |= {name: installed[name] for name in TORCH_STACK if name in installed}
    return "".join(f"{name}=={version}\n" for name, version in pins.items())


def create(venv: Path, *, see_installed: bool) -> None:
    """Create an environment with pip, using venv, virtualenv or this Python's pip (Debian packages ensurepip
    separately)."""
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
        message = f"`{sys.executable}` cannot create a virtual environment: it has no ensurepip, virtualenv or pip"
        hint = "apt-get install python3-venv    # Debian and Ubuntu, as root\n"
        hint += "  or: make run PYTHON=/path/to/another/python"
        raise SetupError(message, hint)
    if see_installed and sys.prefix != sys.base_prefix:
        # An environment created from another one would see the packages of the base Python instead of its parent's.
        (packages,) = (venv / "lib").glob("python*/site-packages")
        lines = [f"import site; site.addsitedir({folder!r})" for folder in site.getsitepackages()]
        (packages / "stepscope_parent.pth").write_text("\n".join(lines) + "\n")


def discard(venv: Path) -> None:
    """Empty the environment except for its stamp. Raises SetupError if `make` did not create it."""
    if not venv.exists() or not any(venv.iterdir()):
        return
    if not (venv / STAMP).exists():
        raise SetupError(f"`{venv}` was not created by `make` and is left unchanged", "make clean    # removes .venv")
    say(f"recreating {venv.name}: it is unfinished, was moved, or belongs to another Python or TORCH")
    for entry in venv.iterdir():
        if entry.name == STAMP:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def say_what_is_missing(python: Path) -> None:
    """Report the packages that DEPS left out, so that later errors are no surprise."""
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
    """Run a command under a title, with the elapsed seconds on a terminal. The output of pip is shown only on
    failure."""
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
        # Only the end, which has the reason. Warnings too, because a refused connection is one.
        say("\n".join(complaints.splitlines()[-20:]))
        raise SetupError(f"stage failed: {title}", hint)


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
    """A digest that changes with the installed packages, but not with, say, a lint rule in pyproject.toml."""
    relevant = [project.get(table) for table in ("build-system", "project", "dependency-groups")]
    relevant += [project.get("tool", {}).get("setuptools"), read_pins(), Path(__file__).read_text()]
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def name_of(requirement: str) -> str:
    """The normalized name of a requirement: `Some_Package[extra]>=1` -> `some-package`."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement)[0]).lower()


def say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
