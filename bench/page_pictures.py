"""The pictures of report pages in the docs, taken from committed results.

    python bench/page_pictures.py [OUT]    (no GPU; seconds; needs playwright and chromium)

OUT is docs/figures by default. Each picture is a screenshot of a real browser, cut at a height that shows the summary
and the first charts, or of one section.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Browser, sync_playwright

from worked_example_figures import squeeze

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "bench/results/reports_h200"
# The runs of each page, the height of its picture in CSS pixels, and the section that it shows, or else its top.
PAGES: dict[str, tuple[tuple[str, ...], int, str]] = {
    "report_small_fp32.png": (("small-fp32",), 1620, ""),
    "report_small_both.png": (("small-fp32", "small-fast"), 1400, ""),
    "report_flame.png": (("small-fp32",), 1575, "#section-time"),
}
WIDTH, SCALE = 1280, 1.25


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/figures"
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as directory, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (runs, height, section) in PAGES.items():
            page = Path(directory) / f"{name}.html"
            command = [sys.executable, "-m", "stepscope", "report", *runs, "--out", str(page)]
            subprocess.run(command, cwd=RUNS, check=True, stdout=subprocess.DEVNULL)
            (out / name).write_bytes(squeeze(photograph(browser, page, height, section)))
        browser.close()


def photograph(browser: Browser, page: Path, height: int, section: str) -> bytes:
    """Return a page as PNG, from its top or from a section. The viewport is as high as the picture, so all charts in it
    are drawn."""
    opened = browser.new_page(viewport={"width": WIDTH, "height": height}, device_scale_factor=SCALE)
    opened.goto(f"{page.as_uri()}{section}")
    opened.wait_for_timeout(500)
    if not section:
        return opened.screenshot()
    left = opened.locator("main").bounding_box()
    assert left is not None, "a page has a main part"
    return opened.screenshot(clip={"x": left["x"], "y": 0, "width": left["width"], "height": height})


if __name__ == "__main__":
    main()
