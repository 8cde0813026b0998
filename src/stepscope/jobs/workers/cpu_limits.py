"""Keeps PyTorch from instructions that this CPU advertises but cannot run.

Some virtual machines advertise AMX although their hypervisor does not allow it. Any bf16 GEMM then crashes with SIGILL,
unless oneDNN is told not to use AMX. So before torch is first loaded, a child process runs the parts of a training step
(`measure.instructions`). If it crashes, it runs again under each setting that may help, from the newest instruction set
to the oldest. Settings that work go into the environment, which every later process inherits.

The probe takes about as long as importing torch, so its result is cached per machine, CPU, kernel and version of torch.
It runs on every x86 CPU, since AMX is the usual but not the only instruction set that hypervisors get wrong. Compiling
takes ten times as long, and is probed only once something is limited: where oneDNN's AMX kernels run, those that
Inductor generates run as well.
"""

import hashlib
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, Self

import msgspec

import stepscope
from stepscope.errors import StepscopeError
from stepscope.files import cache_folder, decode, read_plain, write_atomically
from stepscope.measure.instructions import ALIASES, LEVELS, PARTS, REMEDIES, read_limits, say_limits

# The result, for processes that this one starts: they need not probe again, nor mistake our limits for the user's.
INHERITED = "STEPSCOPE_CPU_LIMITS"
_FOLDER = "instructions"
# The machine's permanent id; in a container without one, the boot id of its host.
_IDENTITIES = (Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id"))
_TIMEOUT_S = 300.0
# Raised by the CPU. Other signals come from another process (SIGKILL, SIGTERM) or a library that gave up (SIGABRT).
_FAULTS = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE)


class CpuLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What was set so that PyTorch works on this CPU, and why: each crash of the probe that led to a setting."""

    key: str
    settings: dict[str, str] = {}
    deaths: tuple[str, ...] = ()


class ProbeOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one run of the probe ended: the part that crashed and the signal; no part if none did. `conclusive` is False
    if something else ended the probe, so that nothing is known.
    """

    part: str = ""
    signal: str = ""
    conclusive: bool = True


class CpuIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What the result depends on. `identity` distinguishes virtual machines that share a home directory and look the
    same: the hypervisor of one may forbid what that of another allows.
    """

    cpu: str
    flags: str
    kernel: str
    torch: str
    identity: str = ""

    @classmethod
    def here(cls) -> Self:
        cpu = _read_cpuinfo()
        try:
            torch = version("torch")
        except PackageNotFoundError:  # importable but not installed
            torch = ""
        return cls(
            cpu=cpu.get("model name", ""),
            flags=cpu.get("flags", ""),
            kernel=platform.release(),
            torch=torch,
            identity=read_identity(),
        )

    def key(self, own: Mapping[str, str]) -> str:
        content = msgspec.json.encode([self, stepscope.__version__, own], order="sorted")
        return hashlib.sha256(content).hexdigest()[:24]


class InstructionProbe(Protocol):
    def __call__(self, settings: Mapping[str, str], *, compiled: bool) -> ProbeOutcome:
        """Run the probe once with these variables; `compiled` also probes compiled code."""
        ...


@cache
def limit_instructions() -> CpuLimits:
    """Call this before loading torch, or starting a process that does. Later calls cost nothing."""
    # The levels are x86 levels. No CPU of another kind is known to need this.
    if find_spec("torch") is None or platform.machine() not in ("x86_64", "AMD64"):
        return CpuLimits(key="")
    return settle_limits(os.environ, CpuIdentity.here(), run_probe)


def settle_limits(environ: MutableMapping[str, str], machine: CpuIdentity, probe: InstructionProbe) -> CpuLimits:
    """Find what must be set on this machine, from the cache or by probing, and set it in `environ`."""
    inherited = _decode(environ.get(INHERITED, "").encode())
    if inherited is not None:
        for name, value in inherited.settings.items():
            if environ.get(name) == value:  # set by us, perhaps for another machine, and never by the user
                del environ[name]
    own = read_limits(environ)
    key = machine.key(own)
    if inherited is None or inherited.key != key:
        inherited = _read_cache(key)
    limits = inherited or _find_limits(key, own, probe)
    environ.update(limits.settings)
    environ[INHERITED] = msgspec.json.encode(limits).decode()
    return limits


def run_probe(settings: Mapping[str, str], *, compiled: bool) -> ProbeOutcome:
    # -P, as for every worker: a stray `random.py` in the current directory must not break torch.
    command = [sys.executable, "-P", "-m", "stepscope.measure.instructions", *(["compiled"] if compiled else [])]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=_TIMEOUT_S,
            env={**os.environ, **settings},
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return ProbeOutcome(conclusive=False)
    if done.returncode == 0:
        return ProbeOutcome()
    begun = [line for line in done.stdout.decode(errors="replace").splitlines() if line in PARTS]
    if -done.returncode not in _FAULTS or not begun:  # the first worker reports a torch that cannot be imported
        return ProbeOutcome(conclusive=False)
    return ProbeOutcome(part=begun[-1], signal=signal.Signals(-done.returncode).name)


def _find_limits(key: str, own: Mapping[str, str], probe: InstructionProbe) -> CpuLimits:
    """Go part by part: where one crashes, use the first setting under which it does not."""
    settings: dict[str, str] = {}
    deaths: list[str] = []
    outcome = probe(settings, compiled="ONEDNN_MAX_CPU_ISA" in _names(own))
    while outcome.part:
        part = outcome.part
        deaths.append(f"{outcome.signal} in {part}")
        tried: list[dict[str, str]] = []
        for candidate in _candidates(part, settings, own):
            tried.append(candidate)
            outcome = probe(candidate, compiled=True)
            if outcome.conclusive and (not outcome.part or PARTS.index(outcome.part) > PARTS.index(part)):
                settings = candidate
                break
        else:
            raise _give_up(deaths[-1], own, tried)
    limits = CpuLimits(key=key, settings=settings, deaths=tuple(deaths))
    if outcome.conclusive:
        _write_cache(limits)
    return limits


def _candidates(part: str, settings: Mapping[str, str], own: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """One variable at a time, from the newest instructions to the oldest, then the oldest of all together. Nothing if
    the user has set one of them: that is their decision.
    """
    remedies = REMEDIES[part]
    if _names(own) & set(remedies):
        return
    for name in remedies:
        levels = LEVELS[name]
        start = levels.index(settings[name]) + 1 if name in settings else 0
        yield from ({**settings, name: level} for level in levels[start:])
    if len(remedies) > 1:
        yield {**settings, **{name: LEVELS[name][-1] for name in remedies}}


def _names(own: Mapping[str, str]) -> set[str]:
    return {ALIASES.get(name, name) for name in own}


def _give_up(death: str, own: Mapping[str, str], tried: list[dict[str, str]]) -> StepscopeError:
    names = sorted({name for candidate in tried for name in candidate})
    said = "".join(f"\ntried {name}: {', '.join(_values(name, tried))}" for name in names)
    if own:
        return StepscopeError(
            f"PyTorch crashes on this CPU under `{say_limits(own)}`: {death}",
            detail=f"these variables were set before stepscope started and are not changed{said}",
            hint=f"unset {' '.join(own)}",
        )
    return StepscopeError(
        f"PyTorch crashes on this CPU: {death}",
        detail=f"limiting the instruction set did not help{said}",
        hint="python -m stepscope.measure.instructions compiled    # reproduces the crash",
    )


def _values(name: str, tried: list[dict[str, str]]) -> list[str]:
    return list(dict.fromkeys(candidate[name] for candidate in tried if name in candidate))


def read_identity(places: Iterable[Path] = _IDENTITIES) -> str:
    """Only used in a hash: a machine id is confidential."""
    for place in places:
        with suppress(OSError):
            if found := place.read_text(errors="replace").strip():
                return found
    return ""


def _read_cpuinfo() -> dict[str, str]:
    """Reads the first CPU. All CPUs of a machine are the same for our purposes."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def _read_cache(key: str) -> CpuLimits | None:
    """Return None if the entry is missing, damaged, or from another machine."""
    try:
        limits = _decode(read_plain(_cache_path(key)))
    except OSError:
        return None
    return limits if limits is not None and limits.key == key else None


def _write_cache(limits: CpuLimits) -> None:
    """If the cache cannot be written, the only cost is another probe."""
    path = _cache_path(limits.key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.encode(limits))
    except OSError:
        return


def _cache_path(key: str) -> Path:
    return cache_folder() / _FOLDER / f"{key}.json"


def _decode(content: bytes) -> CpuLimits | None:
    try:
        limits = decode(content, CpuLimits)
    except msgspec.DecodeError:
        return None
    return limits if set(limits.settings) <= set(LEVELS) else None
