"""Is this machine fit to measure on? A list of checks, each fine, limited or broken, with what to do about it.

`limited` means that part of stepscope works, or that figures need care; `broken` that something which is there does not
work. A laptop without a GPU is limited, not broken.
"""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec
import pynvml

from stepscope.errors import StepscopeError
from stepscope.findings import Column, Table
from stepscope.hardware import available_bytes, find
from stepscope.jobs.recorders.nsight_compute import PERMISSION, PERMISSION_ADVICE
from stepscope.jobs.workers.cpu_limits import CpuLimits, limit_instructions
from stepscope.jobs.workers.messages import Failed, Inspect, Inspected, OutOfMemory, Result
from stepscope.jobs.workers.process import Died, Workers
from stepscope.measure.instructions import read_limits, say_limits
from stepscope.recording.rows.bench import DeviceState, Inspection
from stepscope.units import GIB

Verdict = Literal["fine", "limited", "broken"]

_BUSY_LOAD = 0.3  # load average a core, above which timings on the CPU suffer
_LITTLE_MEMORY = 2 * GIB
_SYS_ADMIN = 21  # the bit of the capability, by Linux's numbering


class MachineCheck(msgspec.Struct, frozen=True, kw_only=True):
    subject: str
    verdict: Verdict
    found: str
    advice: str = ""


def examine() -> list[MachineCheck]:
    checks = [_check_python(), *_check_host()]
    if find_spec("torch") is None:
        install = "to run models: pip install 'stepscope[train]'"
        checks.append(MachineCheck(subject="torch", verdict="limited", found="not installed", advice=install))
    else:
        checks += _check_torch()
    checks.append(_check_compiler())
    checks.append(_check_package("transformers", "for --hf: pip install 'stepscope[hf]'"))
    checks += [
        _check_tool("nsys", "for Nsight Systems recordings"),
        _check_tool("ncu", "for hardware counters"),
    ]
    checks.append(_check_counters())
    return checks


def checks_table(checks: list[MachineCheck]) -> Table:
    names = ("subject", "verdict", "found", "advice")
    return Table(
        title="Is this machine fit to measure on?",
        columns=tuple(Column(key=name, label=name) for name in names),
        rows=tuple((check.subject, check.verdict, check.found, check.advice) for check in checks),
    )


def any_broken(checks: list[MachineCheck]) -> bool:
    return any(check.verdict == "broken" for check in checks)


def _check_python() -> MachineCheck:
    return MachineCheck(subject="python", verdict="fine", found=platform.python_version())


def _check_host() -> list[MachineCheck]:
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0] / cores
    free = available_bytes()
    busy, little = load > _BUSY_LOAD, free < _LITTLE_MEMORY
    return [
        MachineCheck(
            subject="cpu",
            verdict="limited" if busy else "fine",
            found=f"{cores} cores, load {load:.2f} a core",
            advice="other work is running: CPU timings will spread" if busy else "",
        ),
        MachineCheck(
            subject="memory",
            verdict="limited" if little else "fine",
            found=f"{free / GIB:.1f} GiB free",
            advice="small workloads only" if little else "",
        ),
    ]


def _check_torch() -> list[MachineCheck]:
    instructions = _check_instructions()
    if instructions.verdict == "broken":  # and so is whatever would load torch
        return [instructions]
    with Workers() as workers:
        answer = workers.run(Inspect()).answer
    return [instructions, *_judge_answer(answer)]


def _check_instructions() -> MachineCheck:
    try:
        limits = limit_instructions()
    except StepscopeError as error:
        return MachineCheck(subject="cpu instructions", verdict="broken", found=error.message, advice=error.hint)
    return judge_instructions(limits, read_limits(os.environ))


def judge_instructions(limits: CpuLimits, in_effect: Mapping[str, str]) -> MachineCheck:
    """Which of the CPU's instructions PyTorch may use: what we had to set, and what somebody else has set."""
    subject, slower = "cpu instructions", "CPU timings are those of older instructions"
    if limits.settings:
        found = f"{'; '.join(limits.deaths)}: set {say_limits(limits.settings)}"
        advice = f"advertised, but not allowed on this machine: {slower}"
        return MachineCheck(subject=subject, verdict="limited", found=found, advice=advice)
    if in_effect:
        advice = f"{slower}; unset {' '.join(in_effect)} to use all"
        return MachineCheck(
            subject=subject, verdict="limited", found=f"{say_limits(in_effect)}, as set by you", advice=advice
        )
    return MachineCheck(subject=subject, verdict="fine", found="not limited")


def _judge_answer(answer: Result | Died) -> list[MachineCheck]:
    if isinstance(answer, Inspected):
        return _judge_torch(answer.inspection)
    assert isinstance(answer, Failed | Died | OutOfMemory), "an inspection is answered by one or fails"
    reason = f"{answer.message} {answer.detail}".strip() if isinstance(answer, Failed) else answer.reason
    return [MachineCheck(subject="torch", verdict="broken", found=reason, advice="pip install 'stepscope[train]'")]


def _judge_torch(found: Inspection) -> list[MachineCheck]:
    checks = [
        MachineCheck(
            subject="torch",
            verdict="broken" if found.torch_problem else "fine",
            found=found.torch_problem or f"{found.torch}, {found.threads} threads",
            advice="pip install 'stepscope[train]'" if found.torch_problem else "",
        ),
        _judge_triton(found),
        _judge_cuda(found),
    ]
    for index, device in enumerate(found.devices):
        checks += _judge_device(f"gpu {index}", device)
    return checks


def _judge_triton(found: Inspection) -> MachineCheck:
    if found.triton is None:
        advice = "for --compile on a GPU: pip install 'stepscope[train]'"
        return MachineCheck(subject="triton", verdict="limited", found="not installed", advice=advice)
    return MachineCheck(subject="triton", verdict="fine", found=found.triton)


def _judge_cuda(found: Inspection) -> MachineCheck:
    has_gpu = found.driver is not None or Path("/dev/nvidiactl").exists()
    if found.devices:
        return MachineCheck(subject="cuda", verdict="fine", found=f"{found.cuda}, driver {found.driver or 'unknown'}")
    if not has_gpu:
        return MachineCheck(subject="cuda", verdict="limited", found="no GPU", advice="workloads run on the CPU")
    built = f"torch built for CUDA {found.cuda}" if found.cuda else "this torch is a CPU build"
    advice = "install a torch built for CUDA, then `make run TORCH=installed`"
    return MachineCheck(subject="cuda", verdict="broken", found=f"a GPU is here but {built} sees none", advice=advice)


def _judge_device(subject: str, device: DeviceState) -> list[MachineCheck]:
    known = find(device.name)
    free = device.free_bytes / device.total_bytes
    others = device.other_processes or ()
    used = free < 0.9 or bool(others)
    company = f"{len(others)} other process(es) hold it: timings are shared" if others else "something holds the rest"
    checks = [
        MachineCheck(
            subject=subject,
            verdict="fine" if known else "limited",
            found=f"{device.name}, compute capability {device.capability}",
            advice="" if known else "no data sheet: the peak is measured, and MFU is against that",
        ),
        MachineCheck(
            subject=f"{subject} memory",
            verdict="limited" if used else "fine",
            found=f"{device.free_bytes / GIB:.1f} of {device.total_bytes / GIB:.1f} GiB free",
            advice=company if used else "",
        ),
    ]
    return [*checks, _judge_clocks(f"{subject} clocks", device)]


def _judge_clocks(subject: str, device: DeviceState) -> MachineCheck:
    if device.sm_mhz is None or device.throttled_by is None:
        advice = "throttling cannot be seen: watch the spread"
        return MachineCheck(subject=subject, verdict="limited", found="the driver does not tell", advice=advice)
    found = f"SM {device.sm_mhz} of {device.max_sm_mhz} MHz now"
    if device.throttled_by:
        advice = "let it cool, or mind the power limit"
        held = f"{found}, held back by {', '.join(device.throttled_by)}"
        return MachineCheck(subject=subject, verdict="limited", found=held, advice=advice)
    return MachineCheck(subject=subject, verdict="fine", found=found)


def _check_package(name: str, advice: str) -> MachineCheck:
    if find_spec(name) is None:
        return MachineCheck(subject=name, verdict="limited", found="not installed", advice=advice)
    return MachineCheck(subject=name, verdict="fine", found="installed")


def _check_compiler() -> MachineCheck:
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        advice = "for --compile, install one: apt-get install g++"
        return MachineCheck(subject="compiler", verdict="limited", found="no C++ compiler", advice=advice)
    return MachineCheck(subject="compiler", verdict="fine", found=found)


def _check_tool(name: str, purpose: str) -> MachineCheck:
    path = shutil.which(name)
    if path is None:
        return MachineCheck(subject=name, verdict="limited", found="not on the PATH", advice=f"{purpose}, install it")
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return MachineCheck(
            subject=name, verdict="broken", found=f"{path} does not run: {error}", advice="install it again"
        )
    if done.returncode:
        found = f"{path} --version exits with {done.returncode}"
        return MachineCheck(subject=name, verdict="broken", found=found, advice="install it again")
    version = re.search(r"\d{4}\.\d+(\.\d+)*", done.stdout)
    return MachineCheck(subject=name, verdict="fine", found=version[0] if version else path)


def _check_counters() -> MachineCheck:
    parameters = Path("/proc/driver/nvidia/params")
    return judge_counters(
        parameters.read_text() if parameters.exists() else None,
        is_administrator=_is_administrator(Path("/proc/self/status").read_text()),
        is_confidential=_is_confidential(),
    )


def judge_counters(parameters: str | None, *, is_administrator: bool, is_confidential: bool) -> MachineCheck:
    """May this process read performance counters? NVIDIA's driver lets everybody, or administrators only, as the text
    of its `parameters` says; in confidential-computing mode it lets nobody."""
    if parameters is None:
        return MachineCheck(
            subject="counters", verdict="limited", found="no NVIDIA driver", advice="traces only, no counters"
        )
    if is_confidential:
        advice = "traces only; its mode for developers (devtools) has counters, and attests to nothing"
        return MachineCheck(subject="counters", verdict="limited", found="off: confidential computing", advice=advice)
    admin_only = re.search(r"RmProfilingAdminOnly:\s*1", parameters) is not None
    if admin_only and not is_administrator:
        return MachineCheck(
            subject="counters",
            verdict="limited",
            found=f"for administrators only: ncu will say {PERMISSION}",
            advice=f"{PERMISSION_ADVICE}; a container needs the capability SYS_ADMIN",
        )
    return MachineCheck(
        subject="counters", verdict="fine", found="permitted, to administrators" if admin_only else "permitted"
    )


def _is_administrator(status: str) -> bool:
    """By the capability that the driver looks for: root inside of a container has it or not."""
    effective = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", status, re.MULTILINE)
    return effective is not None and bool(int(effective[1], 16) >> _SYS_ADMIN & 1)


def _is_confidential() -> bool:
    """Whether the GPUs keep their secrets from this host, and their counters with them."""
    try:
        pynvml.nvmlInit()
        state = pynvml.nvmlSystemGetConfComputeState()
    except pynvml.NVMLError:  # no driver, or one from before there was such a mode
        return False
    enabled = state.ccFeature == pynvml.NVML_CC_SYSTEM_FEATURE_ENABLED
    return bool(enabled and state.devToolsMode == pynvml.NVML_CC_SYSTEM_DEVTOOLS_MODE_OFF)
