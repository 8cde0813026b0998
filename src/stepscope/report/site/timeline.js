// A timeline as a chart: stacked areas that move under the pointer, however many events they are of. Several can stand
// on one page; each has its own state, in `model`.
charts.timeline = (root, part, page) => {
  const model = layTimeline(part, page);
  const { areas, line, pieces, view, state, plot, first, end } = model;
  const legend = element("ul", undefined, "legend");
  const detail = Object.assign(element("input"), { type: "range", min: 0, max: 100, step: 0.1 });
  const shown = element("output", undefined, "shown");
  const peak = model.findPeak();
  const summary = model.numSlices
    ? `Peak ${model.formatHeight(model.totals[peak])} at ${model.formatTime(model.times[peak])}.`
    : "Nothing to draw.";
  const back = plotting.makeCanvas("back", `${part.yLabel} over ${part.xLabel}. ${summary}`);
  const front = plotting.makeCanvas("front");
  const painter = makeTimelinePainter(model, back, front, page);
  const redraw = plotting.onceAFrame(painter.draw);
  // Called with the piece that was chosen, or -1; the stand-alone page marks its row.
  let onChoose = () => {};

  // ---- the view

  function setView(start, stop, low, high) {
    model.setView(start, stop, low, high);
    redraw();
  }

  function zoom(factor, share = { x: 0.5, y: 1 }) {
    const at = view.start + share.x * (view.end - view.start);
    setView(at - (at - view.start) * factor, at + (view.end - at) * factor);
  }

  function zoomHeight(factor, share) {
    const at = view.low + (1 - share.y) * (view.high - view.low);
    if ((view.high - view.low) * factor < state.top / 1e4) return;
    setView(view.start, view.end, at - (at - view.low) * factor, at + (view.high - at) * factor);
  }

  function pan(across, up) {
    const [along, rise] = [across * (view.end - view.start), up * (view.high - view.low)];
    setView(view.start + along, view.end + along, view.low + rise, view.high + rise);
  }

  const reset = () => setView(first, end, 0, state.top);
  const isWhole = () => view.start <= first && view.end >= end && view.high - view.low >= state.top;

  function setDetail(percent) {
    state.numShown = Math.min(pieces.length, Math.ceil(Math.round(percent * pieces.length * 1e4) / 1e6));
    const [some, all] = [state.numShown, pieces.length].map((count) => page.formatNumber(count, 0));
    shown.textContent = `${Number(percent.toFixed(1))}%: ${some} of ${all} pieces`;
    redraw();
  }

  function choose(index) {
    state.chosen = state.chosen === index ? -1 : index;
    onChoose(state.chosen);
    if (state.chosen < 0) return redraw();
    const piece = pieces[index];
    const [start, stop] = [model.timeOf(piece.start), model.timeOf(piece.end)];
    if (!areas[piece.area].shown) toggle(areas[piece.area]);
    if (stop > view.start && start < view.end) return redraw();
    const span = Math.max(view.end - view.start, (stop - start) * 1.5);
    return setView((start + stop - span) / 2, (start + stop + span) / 2);
  }

  // ---- around the canvas

  function toggle(what) {
    what.shown = !what.shown;
    what.button.setAttribute("aria-pressed", String(what.shown));
    model.sumUp();
    redraw();
  }

  // From the top of the stack down, as it is seen.
  function buildLegend() {
    legend.setAttribute("aria-label", "areas, from the top of the stack down");
    for (const what of [...areas.toReversed(), ...(line ? [line] : [])]) {
      const swatch = element("i");
      if (what === line) swatch.className = "dashed";
      else what.swatch = swatch;
      what.button = page.button(undefined, "", () => toggle(what));
      what.button.setAttribute("aria-pressed", "true");
      what.button.append(swatch, element("span", what.name));
      const item = element("li");
      item.append(what.button);
      legend.append(item);
    }
  }

  function readTheme() {
    painter.readTheme();
    for (const area of areas) paintSwatch(area.swatch, page.colourOf(area.name));
  }

  function build() {
    const controls = element("div", undefined, "controls");
    const label = element("label", "detail ");
    label.append(detail);
    controls.append(label, shown, page.button("whole timeline", "quiet", reset));
    controls.hidden = !pieces.length;
    const stage = element("div", undefined, "plot");
    stage.append(back, front);
    const wheel = page.wheelIsFree ? "The wheel zooms in time, and with Shift in height"
      : "Click, then the wheel zooms in time, and with Shift in height";
    const help = `${wheel}; dragging moves. Keys: arrows, +, −, and 0 or a double click for the whole timeline. `
      + "Names above switch areas off and on.";
    page.bodyOf(root).append(legend, stage, controls, ...plotting.makeHelp(help));
  }

  function listen() {
    detail.value = part.detail * 100;
    detail.addEventListener("input", () => setDetail(Number(detail.value)));
    plotting.makeMovable(back, {
      frame: () => plot,
      zoom: (factor, share, isShift) => (isShift ? zoomHeight(factor, share) : zoom(factor, share)),
      pan,
      reset,
      isWhole,
      point: (place) => {
        state.pointer = place;
        painter.drawPointer();
      },
      keys: {
        ArrowUp: () => pan(0, 0.1),
        ArrowDown: () => pan(0, -0.1),
        Escape: () => state.chosen >= 0 && choose(state.chosen),
      },
      wheelIsFree: page.wheelIsFree,
    });
  }

  buildLegend();
  build();
  listen();
  readTheme();
  painter.draw();
  setDetail(part.detail * 100);
  root.chart = {
    ...model,
    setView,
    zoom,
    choose,
    listenToChoice: (callback) => (onChoose = callback),
    redraw: () => {
      readTheme();
      painter.draw();
    },
  };
  return root.chart;
};
