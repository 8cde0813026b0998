// What a reader does with the page of a timeline: moving, choosing, switching areas. The last part
// of the script.

function setView(start, stop, low = view.low, high = view.high) {
  const least = (end - first) / Math.max(numSlices, 1) / 4;
  const span = Math.min(Math.max(stop - start, least), end - first);
  const from = Math.min(Math.max(start, first), end - span);
  const rise = Math.min(high - low, state.top);
  const floor = Math.min(Math.max(low, 0), state.top - rise);
  Object.assign(view, { start: from, end: from + span, low: floor, high: floor + rise });
  redraw();
}

function zoom(factor, share = 0.5) {
  const at = view.start + share * (view.end - view.start);
  setView(at - (at - view.start) * factor, at + (view.end - at) * factor);
}

function zoomHeight(factor, share = 0) {
  const at = view.low + share * (view.high - view.low);
  if ((view.high - view.low) * factor < state.top / 1e4) return;
  setView(view.start, view.end, at - (at - view.low) * factor, at + (view.high - at) * factor);
}

const pan = (share, rise = 0) => {
  const [across, up] = [share * (view.end - view.start), rise * (view.high - view.low)];
  setView(view.start + across, view.end + across, view.low + up, view.high + up);
};
const reset = () => setView(first, end, 0, state.top);

function choose(index) {
  state.chosen = state.chosen === index ? -1 : index;
  for (const row of byId("pieces").children) {
    row.setAttribute("aria-selected", String(Number(row.dataset.piece) === state.chosen));
  }
  if (state.chosen < 0) return redraw();
  const piece = pieces[index];
  const [start, stop] = [timeOf(piece.start), timeOf(piece.end)];
  const button = byId("legend").querySelector(`[data-area="${piece.area}"]`);
  if (!areas[piece.area].shown) toggle(areas[piece.area], button);
  if (stop > view.start && start < view.end) return redraw();
  const span = Math.max(view.end - view.start, (stop - start) * 1.5);
  return setView((start + stop - span) / 2, (start + stop + span) / 2);
}

const fingers = new Map();

function listenToPointer() {
  back.addEventListener("wheel", (event) => {
    event.preventDefault();
    const factor = Math.exp(Math.max(-1, Math.min(1, (event.deltaY || event.deltaX) * 0.0022)));
    if (event.shiftKey) zoomHeight(factor, 1 - (event.offsetY - plot.top) / plot.height);
    else zoom(factor, (event.offsetX - plot.left) / plot.width);
  }, { passive: false });
  back.addEventListener("pointerdown", (event) => {
    back.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    back.classList.add("moving");
  });
  back.addEventListener("pointermove", (event) => {
    const before = fingers.get(event.pointerId);
    const now = { x: event.offsetX, y: event.offsetY };
    state.pointer = now;
    if (!before) return drawPointer();
    const others = [...fingers].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
    fingers.set(event.pointerId, now);
    if (!others.length) return pan((before.x - now.x) / plot.width, (now.y - before.y) / plot.height);
    const [was, is] = [Math.abs(before.x - others[0].x), Math.abs(now.x - others[0].x)];
    return zoom(Math.max(was, 1) / Math.max(is, 1), (others[0].x - plot.left) / plot.width);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    back.addEventListener(name, (event) => {
      fingers.delete(event.pointerId);
      back.classList.toggle("moving", fingers.size > 0);
    });
  }
  back.addEventListener("pointerleave", () => {
    state.pointer = null;
    drawPointer();
  });
  back.addEventListener("dblclick", reset);
}

function listenToKeys() {
  const keys = {
    ArrowLeft: () => pan(-0.1),
    ArrowRight: () => pan(0.1),
    ArrowUp: () => pan(0, 0.1),
    ArrowDown: () => pan(0, -0.1),
    "+": () => zoom(0.75),
    "=": () => zoom(0.75),
    "-": () => zoom(1 / 0.75),
    0: reset,
    Escape: () => state.chosen >= 0 && choose(state.chosen),
  };
  back.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
}

// ---- around the canvas

function toggle(what, button) {
  what.shown = !what.shown;
  button.setAttribute("aria-pressed", String(what.shown));
  sumUp();
  redraw();
}

function buildLegend() {
  const legend = byId("legend");
  const add = (what, index) => {
    const button = element("button");
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    button.dataset.area = index;
    const swatch = element("i");
    if (what.colour) swatch.style.background = what.colour;
    else swatch.className = "dashed";
    button.append(swatch, element("span", what.name));
    button.addEventListener("click", () => toggle(what, button));
    const item = element("li");
    item.append(button);
    legend.append(item);
  };
  for (let index = areas.length - 1; index >= 0; index--) add(areas[index], index);
  if (line) add(line, "line");
}

function buildTable() {
  const body = byId("pieces");
  for (const piece of pieces.slice(0, MOST_ROWS)) {
    const row = element("tr");
    row.tabIndex = 0;
    row.dataset.piece = piece.index;
    row.setAttribute("aria-selected", "false");
    row.append(element("td", formatHeight(piece.size), "number"), element("td", piece.label));
    row.append(element("td", areas[piece.area].name));
    for (const slice of [piece.start, piece.end]) row.append(element("td", formatTime(timeOf(slice)), "number when"));
    row.addEventListener("click", () => choose(piece.index));
    row.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      choose(piece.index);
    });
    body.append(row);
  }
  const all = formatNumber(pieces.length, 0);
  if (pieces.length > MOST_ROWS) byId("rest").textContent = `The largest ${MOST_ROWS} of ${all}.`;
}

function setDetail(percent) {
  state.numShown = Math.min(pieces.length, Math.ceil(Math.round(percent * pieces.length * 1e4) / 1e6));
  const [shown, all] = [state.numShown, pieces.length].map((count) => formatNumber(count, 0));
  byId("shown").textContent = `${Number(percent.toFixed(1))}%: ${shown} of ${all} pieces`;
  redraw();
}

theme = readTheme();
sumUp();
buildLegend();
buildTable();
setDetail(data.detail * 100);
byId("detail").value = data.detail * 100;
byId("detail").addEventListener("input", (event) => setDetail(Number(event.target.value)));
byId("reset").addEventListener("click", reset);
listenToPointer();
listenToKeys();
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  theme = readTheme();
  redraw();
});
new ResizeObserver(resize).observe(back.parentElement);
resize();
