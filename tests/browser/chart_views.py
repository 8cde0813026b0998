"""Helpers for tests of charts: read their pixels and state, and move the pointer."""

import hashlib
from typing import TYPE_CHECKING, Any

from tests.browser.conftest import wait_for_frame

if TYPE_CHECKING:
    from playwright.sync_api import Page

# Charts on canvases, and charts that the page has as SVG.
CANVASES, DRAWINGS = ("lanes", "timeline"), ("roofline", "figure")


def picture(page: "Page", selector: str) -> str:
    """Return a hash of a canvas."""
    wait_for_frame(page)
    return hashlib.sha256(page.eval_on_selector(selector, "(one) => one.toDataURL()").encode()).hexdigest()


def count_colours(page: "Page", selector: str) -> int:
    script = """(one) => {
      const data = one.getContext("2d").getImageData(0, 0, one.width, one.height).data;
      return new Set(new Uint32Array(data.buffer)).size;
    }"""
    return int(page.eval_on_selector(selector, script))


def note_texts(page: "Page") -> None:
    """From now on, texts on canvases are noted for `noted_texts`."""
    page.evaluate(
        """() => {
          const [texts, { prototype }] = [new Set(), CanvasRenderingContext2D];
          const { fillText } = prototype;
          prototype.fillText = function (text, ...place) {
            texts.add(text);
            fillText.call(this, text, ...place);
          };
          window.texts = texts;
        }"""
    )


def noted_texts(page: "Page") -> set[str]:
    return set(page.evaluate("() => [...window.texts]"))


def read_pixel(page: "Page", selector: str, x: float, y: float) -> list[int]:
    """Return red, green, blue and opacity at a place in CSS pixels."""
    script = """(one, [x, y]) => {
      const ratio = one.width / one.clientWidth;
      // Through a copy: a canvas that is read often is moved away from the GPU, with a message.
      const copy = new OffscreenCanvas(1, 1).getContext("2d");
      copy.drawImage(one, -Math.round(x * ratio), -Math.round(y * ratio));
      return [...copy.getImageData(0, 0, 1, 1).data];
    }"""
    pixel: list[int] = page.eval_on_selector(selector, script, [x, y])
    return pixel


def wait_for_chart(page: "Page", selector: str) -> None:
    """Wait for a chart, which is only made when it is about to be seen."""
    page.wait_for_function("(selector) => document.querySelector(selector).chart", arg=selector)
    wait_for_frame(page)


def ask(page: "Page", kind: str, question: str) -> Any:
    """Evaluate an expression over `chart`."""
    wait_for_chart(page, f"figure.{kind}")
    return page.eval_on_selector(f"figure.{kind}", f"({{ chart }}) => ({question})")


def view_of(page: "Page", kind: str = "lanes") -> tuple[float, float]:
    start, end = ask(page, kind, "[chart.view.start, chart.view.end]")
    return start, end


def look_at(page: "Page", kind: str, mark: int) -> None:
    """Moves the mouse to a mark of a drawing."""
    page.locator(f"figure.{kind} .plot").first.scroll_into_view_if_needed()
    place = ask(page, kind, f"chart.placeOf({mark})")
    page.mouse.move(place["x"], place["y"])
    wait_for_frame(page)


def move_to(page: "Page", kind: str, x: float, y: float) -> None:
    """Moves the mouse to a place of a chart's canvas."""
    canvas = page.locator(f"figure.{kind} canvas.back").first
    canvas.scroll_into_view_if_needed()
    wait_for_frame(page)  # a running scroll would hide the tooltip again
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + x, box["y"] + y)
    wait_for_frame(page)
