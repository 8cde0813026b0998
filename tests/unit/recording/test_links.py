"""Saving and finding links."""

from pathlib import Path

import pytest

from stepscope.errors import StepscopeError
from stepscope.recording.rows.links import (
    Collective,
    Link,
    LinkPlace,
    Links,
    find_links,
    keep_links,
    links_path,
    named_interface,
)

PLACE = LinkPlace(backend="gloo", device_name="Test CPU", ranks=2)
SLOW, FAST = Link(latency_ns=1e6, bytes_per_s=1e8), Link(latency_ns=1e5, bytes_per_s=1e9)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def link_of(collective: Collective, place: LinkPlace) -> Link | None:
    found = find_links(place)
    return found.links.get(collective) if found else None


def test_links_are_found_by_place(cache: Path) -> None:
    shaped = LinkPlace(backend="gloo", device_name="Test CPU", ranks=2, interface="eth1")
    keep_links([Links(place=PLACE, links={"all-reduce": FAST}), Links(place=shaped, links={"all-reduce": SLOW})])
    assert links_path() == cache / "links.json"
    assert link_of("all-reduce", PLACE) == FAST
    assert link_of("all-reduce", shaped) == SLOW
    assert link_of("broadcast", PLACE) is None
    for other in (
        LinkPlace(backend="nccl", device_name="Test CPU", ranks=2),
        LinkPlace(backend="gloo", device_name="Test CPU", ranks=4),
        LinkPlace(backend="gloo", device_name="Test CPU", ranks=2, hosts=2),
        LinkPlace(backend="gloo", device_name="Test CPU", ranks=2, dtype="bf16"),
    ):
        assert find_links(other) is None


def test_newer_link_replaces_the_older_and_keeps_the_rest() -> None:
    keep_links([Links(place=PLACE, links={"all-reduce": SLOW, "broadcast": SLOW})])
    keep_links([Links(place=PLACE, links={"all-reduce": FAST})])
    assert link_of("all-reduce", PLACE) == FAST
    assert link_of("broadcast", PLACE) == SLOW


def test_links_file_can_be_copied(tmp_path: Path) -> None:
    carried = keep_links([Links(place=PLACE, links={"all-reduce": FAST})], tmp_path / "away" / "links.json")
    assert find_links(PLACE) is None
    found = find_links(PLACE, carried)
    assert found is not None
    assert found.links == {"all-reduce": FAST}
    with pytest.raises(StepscopeError, match="links file not found"):
        find_links(PLACE, tmp_path / "nowhere.json")


@pytest.mark.parametrize("content", ["[", "{}", '[{"place": 1}]'])
def test_damaged_file_is_an_error_and_is_not_overwritten(cache: Path, content: str) -> None:
    cache.mkdir()
    links_path().write_text(content)
    with pytest.raises(StepscopeError, match="cannot read the links"):
        keep_links([Links(place=PLACE, links={"all-reduce": FAST})])
    assert links_path().read_text() == content
    assert list(cache.iterdir()) == [links_path()]


@pytest.mark.parametrize(("latency_ns", "bytes_per_s"), [(-1, 1e9), (0, 0), (float("nan"), 1e9)])
def test_impossible_link_is_rejected(latency_ns: float, bytes_per_s: float) -> None:
    with pytest.raises(ValueError, match="`latency_ns`"):
        Link(latency_ns=latency_ns, bytes_per_s=bytes_per_s)


def test_each_backend_has_its_own_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert (named_interface("gloo"), named_interface("nccl")) == ("eth1", None)
