"""A process that creates inputs and runs the real command on each of them, with stepscope imported once.

The parent sends the number of an input on stdin. Two answers go to the original stdout: that the input is on disk, with
the command, and the outcome. The output of the command goes to files, including what Rust or a fault handler writes.
"""

import faulthandler
import hashlib
import json
import os
import random
import resource
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import typer

from stepscope.cli import main as cli
from stepscope.errors import Exit
from tests.fuzz.commands import choose_command
from tests.fuzz.mutators import damage_parquet, mutate
from tests.fuzz.seeds import Seed, build_seeds, companions

ADDRESS_BYTES = 64 << 30  # a backstop: the parent watches resident memory
STDOUT, STDERR = "stdout.txt", "stderr.txt"
SIGNED = 0.7  # share of changed tables with a matching digest
UNTOUCHED = 0.02  # share of undamaged inputs, which must be read


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """The input is ready."""

    seed: str
    command: list[str]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """`code` is the exit status of the command; `peak_bytes` is the peak resident memory."""

    code: int
    peak_bytes: int


def serve(folder: Path, number: int, only: str, main: Callable[[], object] = cli.main) -> None:
    """Serve inputs of the run `number` until stdin ends. `only` is a comma-separated list of words; the name of a seed
    must contain one of them."""
    seeds = [seed for seed in build_seeds() if any(word in seed.name for word in only.split(","))]
    good = companions()
    cli.app = typer.main.get_command(cli.app)  # type: ignore[assignment]  # built once: it takes as long as an input
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    questions = os.fdopen(os.dup(0), "rb")
    outputs = folder / "output"
    outputs.mkdir()
    for descriptor, name in ((1, STDOUT), (2, STDERR)):
        os.dup2(os.open(outputs / name, os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
    place = folder / "input"
    os.environ["STEPSCOPE_CACHE"] = str(place / "cache")
    for line in questions:
        chance = random.Random(f"{number}:{int(line)}")
        shutil.rmtree(place, ignore_errors=True)
        seed, command = write_input(place, seeds, good, chance)
        os.chdir(place)
        for descriptor in (1, 2):
            os.ftruncate(descriptor, 0)
        answers.write(msgspec.json.encode(Begun(seed=seed.name, command=command)) + b"\n")
        answers.write(msgspec.json.encode(_run_command(command, main)) + b"\n")


def write_input(
    place: Path, seeds: list[Seed], good: dict[str, bytes], chance: random.Random
) -> tuple[Seed, list[str]]:
    """One damaged seed in `place`, with the other files that a command may need, and the command."""
    (seed,) = chance.choices(seeds, [seed.weight for seed in seeds])
    files = dict(seed.files)
    for _ in range(0 if chance.random() < UNTOUCHED else chance.choice((1, 1, 1, 2))):
        name = chance.choice(sorted(files))
        if len(files) > 1 and chance.random() < 0.03:
            del files[name]
        elif name.endswith(".parquet") and chance.random() < SIGNED:
            files[name] = damage_parquet(seed.files[name], chance)
            _sign(files, name)
        else:
            files[name] = mutate(name, seed.files.get(name, b""), chance)
    for name, content in (good | files).items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    return seed, choose_command(seed, chance)


def _sign(files: dict[str, bytes], name: str) -> None:
    """Update the digest of a changed table in the manifest, so that the code after the digest check runs too."""
    manifest = str(Path(name).with_name("manifest.json"))
    with suppress(ValueError, KeyError, TypeError, RecursionError):  # the manifest may be damaged or missing
        content = json.loads(files[manifest])
        content["digests"][Path(name).stem] = hashlib.blake2b(files[name], digest_size=16).hexdigest()
        files[manifest] = json.dumps(content).encode()


def _run_command(command: list[str], main: Callable[[], object]) -> Outcome:
    """Run the command through `main`, like a shell."""
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak of earlier inputs
    sys.argv = ["stepscope", *command]
    code = int(Exit.OK)
    try:
        main()
    except SystemExit as end:
        code = int(end.code or Exit.OK)
    except BaseException as error:  # noqa: BLE001  # Python would print it, and exit with 1
        sys.stderr.write(f"Traceback: {type(error).__name__} left main: {error}\n")
        code = Exit.GATE_FAILED
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return Outcome(code=code, peak_bytes=peak_bytes())


def peak_bytes(process: str = "self", field: str = "VmHWM:") -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
