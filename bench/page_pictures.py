"""The pictures of report pages in the docs, taken from committed results.

    python bench/page_pictures.py [OUT]    (no GPU; seconds; needs playwright and chromium)

OUT is docs/figures by default. Each picture is a screenshot of a real browser: of the top of a page, cut at a height
that shows the summary and the first charts, of one section, or of a single chart.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Browser, sync_playwright

from worked_example_figures import squeeze

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "bench/results"
BOTH = ("reports_h200/small-fp32", "reports_h200/small-fast")
MANY = tuple(
    f"profile_h200/small-{mode}-{how}" for mode in ("train", "inference") for how in ("fp32", "bf16", "compiled")
)
SECTION = "section-"
# The runs of each page, the height of its picture in CSS pixels, and the section or chart that it shows if not its top.
PAGES: dict[str, tuple[tuple[str, ...], int, str]] = {
    "report_small_fp32.png": (BOTH[:1], 1620, ""),
    "report_small_both.png": (BOTH, 1400, ""),
    "report_flame.png": (BOTH[:1], 1575, "section-time"),
    "compare_steps.png": (BOTH, 1200, "changes-steps"),
    "compare_memory.png": (BOTH, 1200, "changes-memory"),
    "compare_trend.png": (MANY, 1200, "trend-step"),
}
WIDTH, SCALE = 1280, 1.25


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/figures"
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as directory, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (runs, height, shown) in PAGES.items():
            page = Path(directory) / f"{name}.html"
            command = [sys.executable, "-m", "stepscope", "report", *runs, "--out", str(page)]
            subprocess.run(command, cwd=RUNS, check=True, stdout=subprocess.DEVNULL)
            (out / name).write_bytes(squeeze(photograph(browser, page, height, shown)))
        browser.close()


def photograph(browser: Browser, page: Path, height: int, shown: str) -> bytes:
    """Return a page as PNG, from its top or from a section, or one chart of it. The viewport is high enough for all
    charts in it to be drawn."""
    opened = browser.new_page(viewport={"width": WIDTH, "height": height}, device_scale_factor=SCALE)
    opened.goto(f"{page.as_uri()}#{shown}" if shown.startswith(SECTION) else page.as_uri())
    opened.wait_for_timeout(500)
    if not shown:
        return opened.screenshot()
    if not shown.startswith(SECTION):
        return opened.locator(f"#{shown}").screenshot()
    left = opened.locator("main").bounding_box()
    assert left is not None, "a page has a main part"
    return opened.screenshot(clip={"x": left["x"], "y": 0, "width": left["width"], "height": height})


if __name__ == "__main__":
    main()
