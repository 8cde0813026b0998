"""The pictures of report pages in the docs, taken from committed results.

    python bench/page_pictures.py [OUT]    (no GPU; seconds; needs playwright and chromium)

OUT is docs/figures by default. Each picture is a screenshot of a real browser: of the top of a page, cut at a height
that shows the summary and the first charts, or of a single chart.
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
# The runs of each page, and the height of its picture in CSS pixels or the chart that it shows.
PAGES: dict[str, tuple[tuple[str, ...], int | str]] = {
    "report_small_fp32.png": (BOTH[:1], 1620),
    "report_small_both.png": (BOTH, 1400),
    "compare_steps.png": (BOTH, "changes-steps"),
    "compare_memory.png": (BOTH, "changes-memory"),
    "compare_trend.png": (MANY, "trend-step"),
}
WIDTH, SCALE = 1280, 1.25


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/figures"
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as directory, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (runs, shown) in PAGES.items():
            page = Path(directory) / f"{name}.html"
            command = [sys.executable, "-m", "stepscope", "report", *runs, "--out", str(page)]
            subprocess.run(command, cwd=RUNS, check=True, stdout=subprocess.DEVNULL)
            (out / name).write_bytes(squeeze(photograph(browser, page, shown)))
        browser.close()


def photograph(browser: Browser, page: Path, shown: int | str) -> bytes:
    """Return the top of a page, or one chart, as PNG. The viewport is high enough for all charts in it to be drawn."""
    height = shown if isinstance(shown, int) else 1200
    opened = browser.new_page(viewport={"width": WIDTH, "height": height}, device_scale_factor=SCALE)
    opened.goto(page.as_uri())
    opened.wait_for_timeout(500)
    return opened.screenshot() if isinstance(shown, int) else opened.locator(f"#{shown}").screenshot()


if __name__ == "__main__":
    main()
