"""All figures of the docs, drawn again from committed results.

    python bench/figures.py [OUT]    (no GPU; a minute; needs playwright and chromium; OUT is docs/figures by default)

Charts come from the commands that a reader would type. The report pages are screenshots of a real browser, cut at a
height that shows the summary and the timeline.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from bench.worked_example_figures import squeeze

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[1]
RESULTS = Path("bench/results")
STEPSCOPE = ("-m", "stepscope")
CHARTS: dict[str, tuple[str, ...]] = {
    "attention_h200.png": ("bench/attention_speed.py", "--from", f"{RESULTS}/attention_speed_h200.jsonl"),
    "attention_sweep_h200.png": (*STEPSCOPE, "attention", "--from", f"{RESULTS}/attention_h200.jsonl"),
    "memory_large_train_bf16.png": (*STEPSCOPE, "explain", f"{RESULTS}/memory_h200/large-train-bf16"),
}
# The runs of each report page, and the height of its picture in CSS pixels.
PAGES: dict[str, tuple[tuple[str, ...], int]] = {
    "report_small_fp32.png": (("small-fp32",), 1500),
    "report_small_both.png": (("small-fp32", "small-fast"), 1250),
}
WIDTH, SCALE = 1280, 1.25


def main() -> None:
    out = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "docs/figures"
    out.mkdir(parents=True, exist_ok=True)
    run("bench/worked_example_figures.py", f"{RESULTS}/profile_h200", str(out))
    for name, command in CHARTS.items():
        (out / name).unlink(missing_ok=True)
        run(*command, "--plot", str(out / name))
        (out / name).write_bytes(squeeze((out / name).read_bytes()))
    photograph_pages(out)


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def photograph_pages(out: Path) -> None:
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as directory, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (runs, height) in PAGES.items():
            page = Path(directory) / f"{name}.html"
            run(*STEPSCOPE, "report", *(f"{RESULTS}/reports_h200/{one}" for one in runs), "--out", str(page))
            (out / name).write_bytes(photograph(browser, page, height))
        browser.close()


def photograph(browser: "Browser", page: Path, height: int) -> bytes:
    """Return the top of a page as PNG; a viewport of the same height has all of its charts drawn."""
    opened = browser.new_page(viewport={"width": WIDTH, "height": height}, device_scale_factor=SCALE)
    opened.goto(page.as_uri())
    opened.wait_for_timeout(500)
    return squeeze(opened.screenshot())


if __name__ == "__main__":
    main()
