"""Checks whether this machine can measure reliably. Each check is fine, limited or broken, with advice.

`limited` means that some features are unavailable or that results may be noisy. `broken` means that something installed
does not work. A laptop without a GPU is limited, not broken.
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

_BUSY_LOAD = 0.3  # load average per core, above which CPU timings become noisy
_LITTLE_MEMORY = 2 * GIB
_SYS_ADMIN = 21  # the bit of CAP_SYS_ADMIN in Linux


class MachineCheck(msgspec.Struct, frozen=True, kw_only=True):
    subject: str
    verdict: Verdict
    found: str
    advice: str = ""


def examine() -> list[MachineCheck]:
    checks = [_check_python(), *_check_host()]
    if find_spec("torch") is None:
        install = "needed to run models: pip install 'stepscope[train]'"
        checks.append(MachineCheck(subject="torch", verdict="limited", found="not installed", advice=install))
    else:
        checks += _check_torch()
    checks.append(_check_compiler())
    checks.append(_check_package("transformers", "needed for --hf: pip install 'stepscope[hf]'"))
    checks += [
        _check_tool("nsys", "profile --nsys"),
        _check_tool("ncu", "profile --counters"),
    ]
    checks.append(_check_counters())
    return checks


def checks_table(checks: list[MachineCheck]) -> Table:
    names = ("subject", "verdict", "found", "advice")
    return Table(
        title="Machine check",
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
            found=f"{cores} core{'s' * (cores != 1)}, load {load:.2f} per core",
            advice="other processes are running: CPU timings will be noisy" if busy else "",
        ),
        MachineCheck(
            subject="memory",
            verdict="limited" if little else "fine",
            found=f"{free / GIB:.1f} GiB free",
            advice="only small workloads will fit" if little else "",
        ),
    ]


def _check_torch() -> list[MachineCheck]:
    instructions = _check_instructions()
    if instructions.verdict == "broken":  # loading torch would crash
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
    """Which CPU instructions PyTorch may use: the limits that stepscope had to set, and those that the user set."""
    subject, slower = "cpu instructions", "CPU timings are slower than the hardware allows"
    if limits.settings:
        found = f"{'; '.join(limits.deaths)}: set {say_limits(limits.settings)}"
        advice = f"this machine advertises instructions that crash: {slower}"
        return MachineCheck(subject=subject, verdict="limited", found=found, advice=advice)
    if in_effect:
        advice = f"{slower}; to use all instructions: unset {' '.join(in_effect)}"
        return MachineCheck(
            subject=subject, verdict="limited", found=f"{say_limits(in_effect)}, set in your environment", advice=advice
        )
    return MachineCheck(subject=subject, verdict="fine", found="not limited")


def _judge_answer(answer: Result | Died) -> list[MachineCheck]:
    if isinstance(answer, Inspected):
        return _judge_torch(answer.inspection)
    assert isinstance(answer, Failed | Died | OutOfMemory), "an inspection succeeds or fails"
    reason = f"{answer.message} {answer.detail}".strip() if isinstance(answer, Failed) else answer.reason
    return [MachineCheck(subject="torch", verdict="broken", found=reason, advice="pip install 'stepscope[train]'")]


def _judge_torch(found: Inspection) -> list[MachineCheck]:
    checks = [
        MachineCheck(
            subject="torch",
            verdict="broken" if found.torch_problem else "fine",
            found=found.torch_problem or f"{found.torch}, {found.threads} thread{'s' * (found.threads != 1)}",
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
        advice = "needed for --compile on a GPU: pip install 'stepscope[train]'"
        return MachineCheck(subject="triton", verdict="limited", found="not installed", advice=advice)
    return MachineCheck(subject="triton", verdict="fine", found=found.triton)


def _judge_cuda(found: Inspection) -> MachineCheck:
    has_gpu = found.driver is not None or Path("/dev/nvidiactl").exists()
    if found.devices:
        return MachineCheck(subject="cuda", verdict="fine", found=f"{found.cuda}, driver {found.driver or 'unknown'}")
    if not has_gpu:
        return MachineCheck(subject="cuda", verdict="limited", found="no GPU", advice="workloads run on the CPU")
    built = f"torch (built for CUDA {found.cuda})" if found.cuda else "torch (a CPU build)"
    advice = "install a CUDA build of torch, then `make run TORCH=installed`"
    return MachineCheck(
        subject="cuda", verdict="broken", found=f"there is a GPU, but {built} does not see it", advice=advice
    )


def _judge_device(subject: str, device: DeviceState) -> list[MachineCheck]:
    known = find(device.name)
    free = device.free_bytes / device.total_bytes
    others = device.other_processes or ()
    used = free < 0.9 or bool(others)
    count = f"{len(others)} other process{'es' * (len(others) != 1)}"
    company = f"{count} on this GPU: timings will be noisy" if others else "part of the memory is already in use"
    checks = [
        MachineCheck(
            subject=subject,
            verdict="fine" if known else "limited",
            found=f"{device.name}, compute capability {device.capability}",
            advice="" if known else "peak not in the data sheets: stepscope measures it and bases MFU on it",
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
        advice = "throttling cannot be detected: check the spread of the timings"
        return MachineCheck(subject=subject, verdict="limited", found="not reported by the driver", advice=advice)
    found = f"SM {device.sm_mhz} of {device.max_sm_mhz} MHz now"
    if device.throttled_by:
        advice = "let the GPU cool down, or check its power limit"
        held = f"{found}, throttled by {', '.join(device.throttled_by)}"
        return MachineCheck(subject=subject, verdict="limited", found=held, advice=advice)
    return MachineCheck(subject=subject, verdict="fine", found=found)


def _check_package(name: str, advice: str) -> MachineCheck:
    if find_spec(name) is None:
        return MachineCheck(subject=name, verdict="limited", found="not installed", advice=advice)
    return MachineCheck(subject=name, verdict="fine", found="installed")


def _check_compiler() -> MachineCheck:
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        advice = "needed for --compile: apt-get install g++"
        return MachineCheck(subject="compiler", verdict="limited", found="no C++ compiler", advice=advice)
    return MachineCheck(subject="compiler", verdict="fine", found=found)


def _check_tool(name: str, purpose: str) -> MachineCheck:
    path = shutil.which(name)
    if path is None:
        return MachineCheck(subject=name, verdict="limited", found="not on the PATH", advice=f"needed for {purpose}")
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return MachineCheck(
            subject=name, verdict="broken", found=f"{path} does not run: {error}", advice="reinstall it"
        )
    if done.returncode:
        found = f"{path} --version exits with {done.returncode}"
        return MachineCheck(subject=name, verdict="broken", found=found, advice="reinstall it")
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
    """Whether this process may read performance counters. The driver's `parameters` allow everybody or only
    administrators; in confidential-computing mode nobody may."""
    if parameters is None:
        return MachineCheck(
            subject="counters",
            verdict="limited",
            found="no NVIDIA driver",
            advice="traces work; hardware counters do not",
        )
    if is_confidential:
        advice = "traces work; hardware counters require devtools mode, which provides no attestation"
        return MachineCheck(
            subject="counters", verdict="limited", found="disabled by confidential computing", advice=advice
        )
    admin_only = re.search(r"RmProfilingAdminOnly:\s*1", parameters) is not None
    if admin_only and not is_administrator:
        return MachineCheck(
            subject="counters",
            verdict="limited",
            found=f"only for administrators: ncu will fail with {PERMISSION}",
            advice=f"{PERMISSION_ADVICE}; a container needs the SYS_ADMIN capability",
        )
    return MachineCheck(
        subject="counters", verdict="fine", found="available to administrators" if admin_only else "available"
    )


def _is_administrator(status: str) -> bool:
    """Whether the process has the capability that the driver checks. Root in a container may not have it."""
    effective = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", status, re.MULTILINE)
    return effective is not None and bool(int(effective[1], 16) >> _SYS_ADMIN & 1)


def _is_confidential() -> bool:
    """Whether the GPUs run in confidential-computing mode, which disables the counters."""
    try:
        pynvml.nvmlInit()
        state = pynvml.nvmlSystemGetConfComputeState()
    except pynvml.NVMLError:  # no driver, or one without this mode
        return False
    enabled = state.ccFeature == pynvml.NVML_CC_SYSTEM_FEATURE_ENABLED
    return bool(enabled and state.devToolsMode == pynvml.NVML_CC_SYSTEM_DEVTOOLS_MODE_OFF)
