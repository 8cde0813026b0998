"""One browser for all tests, and pages that they use one after another. Each must end without messages and requests."""

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from stepscope.findings import Exhibit, Part, Report, Section
from stepscope.render.site import write_site
from tests.unit.render.report_samples import one_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page

OpenFile = Callable[..., "Page"]
Open = Callable[..., "Page"]


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("chromium is not installed")
    # Root has no user namespaces in most containers, and the page is our own.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=options)
        yield browser
        browser.close()


class Pages:
    """Empty pages. To start the processes of a new one takes longer than to draw a report in one that is there."""

    def __init__(self, browser: "Browser") -> None:
        self._browser = browser
        self._free: dict[str, list[Page]] = defaultdict(list)  # by the options of their context
        self._options: dict[Page, str] = {}

    def take(
        self, width: int, *, color_scheme: Any = "light", reduced_motion: Any = "no-preference", **options: Any
    ) -> "Page":
        """Return a page that looks new and that nobody else has."""
        free = self._free[repr(options)]
        page = free.pop() if free else self._browser.new_context(**options).new_page()
        self._options[page] = repr(options)
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(media="null", color_scheme=color_scheme, reduced_motion=reduced_motion)
        return page

    def give_back(self, page: "Page") -> None:
        """What the page shows ends, with all that its scripts have set."""
        page.mouse.move(-1, -1)
        page.goto("about:blank")
        self._free[self._options[page]].append(page)


@pytest.fixture(scope="session")
def pages(browser: "Browser") -> Pages:
    return Pages(browser)


@pytest.fixture
def open_file(pages: Pages) -> Iterator[OpenFile]:
    """Open pages from files. At the end, check for errors, messages, and requests other than the pages."""
    troubles: list[str] = []
    requests: set[str] = set()
    opened: set[str] = set()
    taken: list[Page] = []

    def refuse(dialog: "Dialog") -> None:
        troubles.append(dialog.message)
        dialog.dismiss()

    listeners: dict[str, Callable[[Any], None]] = {
        "console": lambda message: troubles.append(message.text),
        "pageerror": lambda error: troubles.append(str(error)),
        "dialog": refuse,
        "request": lambda request: requests.add(request.url),
    }

    def open_one(target: Path, *, width: int = 900, **options: Any) -> "Page":
        page = pages.take(width, **options)
        taken.append(page)
        for event, listener in listeners.items():
            page.on(event, listener)  # type: ignore[call-overload]
        opened.add(target.as_uri())
        page.goto(target.as_uri())
        if options.get("java_script_enabled", True):
            wait_for_frame(page)
        return page

    yield open_one
    for page in taken:
        pages.give_back(page)
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
    assert not troubles
    assert requests <= opened


def wait_for_frame(page: "Page") -> None:
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.fixture
def open_report(open_file: OpenFile, tmp_path: Path) -> Open:
    """Open a report's page and scroll to each of its charts, which builds them."""

    def open_one(report: Report, **options: Any) -> "Page":
        target = tmp_path / "report.html"
        target.write_text(write_site(report), encoding="utf-8")
        page = open_file(target, **options)
        for figure in page.locator("figure.lanes, figure.roofline, figure.figure, figure.timeline").all():
            figure.scroll_into_view_if_needed()
            page.wait_for_function("(figure) => figure.chart", arg=figure.element_handle())
        return page

    return open_one


@pytest.fixture
def open_parts(open_report: Open) -> Open:
    def open_them(*parts: Part, **options: Any) -> "Page":
        exhibits = tuple(Exhibit(key=f"part-{number}", part=part) for number, part in enumerate(parts))
        section = Section(key="parts", title="Parts", exhibits=exhibits)
        return open_report(msgspec.structs.replace(one_run(), picture=None, sections=(section,)), **options)

    return open_them
