"""Measures the page of a report: its size, and how long it takes to create, to open and to navigate, for a trace of a
million kernels or any other files.

    python bench/report_page.py --out FILE                                          # a million synthetic kernels
    python bench/report_page.py --kernels 50000 --steps 1 --out FILE                # a step of 50,000
    python bench/report_page.py bench/results/reports_h200/small-fp32 --out FILE    # from files

It requires chromium. One JSON line per page is appended to FILE.
"""

import argparse
import gzip
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

KERNELS = (
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_32x5_tn_align8>(Params)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>(int, float)",
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(at::native::ReduceOp<float>)",
)
LAYERS, MODULES = 96, 8

# Milliseconds until what was begun is on the screen.
TIMED = """async () => {{ const begun = performance.now(); {}
await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
return performance.now() - begun; }}"""
FRAME = TIMED.format("")
# A jump to a section builds all charts of the page.
BREAKDOWN = TIMED.format("document.querySelector('nav a[href=\"#section-time\"]').click();")
UNFOLDED = TIMED.format("[...document.querySelectorAll('.flame button')].at(-1).click();")


def write_trace(path: Path, num_kernels: int, steps: int) -> None:
    """Steps of layers with modules, whose operators launch one kernel each."""
    events: list[str] = []
    each = num_kernels // steps // (LAYERS * MODULES)
    clock, correlation = 0.0, 0

    def add(**event: object) -> None:
        events.append(json.dumps({"ph": "X", "pid": 1, **event}, separators=(",", ":")))

    def add_module(name: str, begun: float) -> None:
        add(cat="python_function", tid=1, name=f"nn.Module: {name}", ts=begun, dur=clock - begun)

    for step in range(steps):
        begun = clock
        for layer in range(LAYERS):
            layer_begun = clock
            for module in range(MODULES):
                module_begun = clock
                for number in range(each):
                    correlation += 1
                    op = {"cat": "cpu_op", "tid": 1, "name": f"aten::op{number % 7}", "ts": clock, "dur": 3.0}
                    add(**op, args={"External id": correlation})
                    ids = {"correlation": correlation, "External id": correlation}
                    launch = {"cat": "cuda_runtime", "tid": 1, "name": "cudaLaunchKernel", "ts": clock + 0.5}
                    add(**launch, dur=1.0, args=ids)
                    kernel = {"cat": "kernel", "tid": 7, "name": KERNELS[number % len(KERNELS)], "ts": clock + 2.0}
                    add(**kernel, dur=1.5 + number % 5, args={**ids, "device": 0, "stream": 7})
                    clock += 7.0
                add_module(f"Part{module}_{layer}", module_begun)
            add_module(f"Block_{layer}", layer_begun)
        named = {"cat": "user_annotation", "tid": 1, "name": f"ProfilerStep#{step}"}
        add(**named, ts=begun, dur=clock - begun)
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write('{"deviceProperties":[{"id":0,"name":"NVIDIA H200"}],"traceEvents":[')
        file.write(",".join(events))
        file.write("]}")


def look(page: Page, path: Path) -> dict[str, float]:
    """Time until the first paint, until the flame view and the tree of modules are drawn, and per frame while zooming
    the step."""
    page.goto(path.absolute().as_uri())
    page.evaluate(FRAME)
    opened = page.evaluate("() => performance.now()")
    broken_down = page.evaluate(BREAKDOWN)
    unfolded = page.evaluate(UNFOLDED)
    root = page.locator("figure[data-kind=lanes]").first
    root.scroll_into_view_if_needed()
    root.locator("canvas").first.click()
    frames = []
    for _ in range(12):
        page.mouse.wheel(0, -240)
        frames.append(page.evaluate(FRAME))
    return {
        "opened_ms": round(opened, 1),
        "breakdown_ms": round(broken_down, 1),
        "unfolded_ms": round(unfolded, 1),
        "two_frames_ms": round(statistics.median(frames), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--kernels", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as driver:
        files, html = arguments.files, Path(scratch) / "page.html"
        if not files:
            files = [Path(scratch) / "million.json.gz"]
            write_trace(files[0], arguments.kernels, arguments.steps)
        command = [sys.executable, "-m", "stepscope", "report", *map(str, files), "--no-cache", "--out", str(html)]
        begun = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        made_s = time.perf_counter() - begun
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        looks = [look(browser.new_page(viewport={"width": 1440, "height": 900}), html) for _ in range(3)]
        row = {
            "files": [str(file) for file in arguments.files]
            or f"{arguments.kernels:,} synthetic kernels in {arguments.steps} steps",
            "made_s": round(made_s, 2),
            "page_bytes": html.stat().st_size,
            **{name: sorted(one[name] for one in looks) for name in looks[0]},
            "browser": browser.version,
        }
        browser.close()
    with arguments.out.open("a") as out:
        out.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
