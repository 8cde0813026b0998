"""Whether a machine permits hardware counters, as `stepscope doctor` tells it."""

import pytest

from stepscope.jobs.doctor import _is_administrator, judge_counters

OPEN = "ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 0\n"
CLOSED = "ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 1\n"


@pytest.mark.parametrize(
    ("parameters", "is_administrator", "is_confidential", "verdict", "found"),
    [
        (None, True, False, "limited", "no NVIDIA driver"),
        (OPEN, False, False, "fine", "available"),
        (CLOSED, True, False, "fine", "available to administrators"),
        (CLOSED, False, False, "limited", "only for administrators: ncu will fail with ERR_NVGPUCTRPERM"),
        (OPEN, True, True, "limited", "disabled by confidential computing"),
    ],
)
def test_counters_are_permitted_by_the_driver_or_not(
    parameters: str | None, is_administrator: bool, is_confidential: bool, verdict: str, found: str
) -> None:
    check = judge_counters(parameters, is_administrator=is_administrator, is_confidential=is_confidential)
    assert (check.verdict, check.found) == (verdict, found)
    assert bool(check.advice) == (verdict != "fine")


@pytest.mark.parametrize(
    ("capabilities", "may"),
    [("000001ffffffffff", True), ("0000000000200000", True), ("00000000a80425fb", False), ("0000000000000000", False)],
)
def test_root_in_a_container_is_an_administrator_only_with_the_capability(capabilities: str, may: bool) -> None:
    assert _is_administrator(f"Name:\tpython\nCapPrm:\tffffffffffffffff\nCapEff:\t{capabilities}\n") is may
