// A timeline as a chart: its data, layout and interaction. timeline_painter.js draws it. A page can have several; each has
// its own state, in `model`.
//
// Areas and pieces are written to pixels directly, column by column: the cost of a frame depends on the pixels of the
// canvas, not on the events of the timeline. As paths, every piece above a busy area would have a thousand corners.
// Columns with several slices show the highest of them, so that no peak is lost at any zoom.
function layTimeline(part, page) {
  // Unpack the data: heights are differences in units of `grain`, pieces are columns.
  const times = Float64Array.from(part.times);
  const numSlices = times.length;
  const accumulate = (steps) => {
    const values = new Float64Array(steps.length);
    for (let at = 0, sum = 0; at < steps.length; at++) values[at] = (sum += steps[at]) * part.grain;
    return values;
  };
  const unpack = ({ name, steps }) => ({ name, values: accumulate(steps), shown: true });
  const areas = part.areas.map(unpack);
  const line = part.line && unpack(part.line);
  const pieces = part.pieces.area.map((area, index) => ({
    index,
    area,
    start: part.pieces.start[index],
    end: part.pieces.end[index],
    size: part.pieces.size[index] * part.grain,
    label: part.strings[part.pieces.label[index]],
    detail: part.pieces.detail[index].map((place) => part.strings[place]),
  }));
  const stackOrder = areas.map((_, area) =>
    pieces.filter((piece) => piece.area === area).sort((a, b) => a.start - b.start || b.size - a.size));
  const first = times[0] || 0;
  const end = part.end;
  const totals = new Float64Array(numSlices);
  const view = { start: first, end, low: 0, high: 1 };
  const state = { numShown: 0, chosen: -1, pointer: null, top: 1 };
  // The position of the plot in the canvas, and the runs of columns that show the same slice, from left to right.
  const plot = { left: 0, top: 0, width: 1, height: 1, ratio: 1 };
  const runs = { slices: new Int32Array(0), edges: new Int32Array(1) };

  // ---- text and numbers

  const formatHeight = (value) =>
    part.bytes ? page.formatBytes(value) : `${page.formatNumber(value)} ${part.yUnit}`.trim();
  const formatTime = (value) => `${page.formatNumber(value)} ${part.xUnit}`.trim();
  const timeOf = (slice) => (slice < numSlices ? times[slice] : end);

  // The unit of the vertical axis, and its size.
  function findUnit() {
    if (!part.bytes) return [part.yUnit, 1];
    let power = 0;
    while (view.high >= 1000 * 1024 ** power && power < UNITS.length - 1) power++;
    return [UNITS[power], 1024 ** power];
  }

  // ---- layout

  // With all areas shown, two timelines next to each other share the height of the higher one.
  function sumUp() {
    totals.fill(0);
    for (const area of areas) if (area.shown) for (let at = 0; at < numSlices; at++) totals[at] += area.values[at];
    let highest = areas.every((area) => area.shown) ? part.highest || 0 : 0;
    for (let at = 0; at < numSlices; at++) highest = Math.max(highest, totals[at]);
    if (line && line.shown) for (let at = 0; at < numSlices; at++) highest = Math.max(highest, line.values[at]);
    state.top = (highest || 1) * 1.1;
    Object.assign(view, { low: 0, high: state.top });
  }

  // The first index in ascending numbers whose value is at least the given one.
  function findPlace(values, value) {
    let low = 0;
    let high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < value) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  function findSlice(time) {
    const place = findPlace(times, time);
    return Math.max(0, times[place] === time ? place : place - 1);
  }
  const findRun = (slice) => findPlace(runs.slices, slice);

  function chooseRuns() {
    const width = Math.round(plot.width * plot.ratio);
    const slices = [];
    const edges = [0];
    const perPixel = (view.end - view.start) / width;
    let next = findSlice(view.start);
    for (let column = 0; column < width && numSlices; column++) {
      let best = next;
      const until = view.start + (column + 1) * perPixel;
      for (let slice = next; slice < numSlices && times[slice] < until; slice++) {
        if (totals[slice] > totals[best]) best = slice;
        next = slice;
      }
      if (slices.length && slices[slices.length - 1] >= best) best = slices[slices.length - 1];
      else slices.push(best);
      edges[slices.length] = column + 1;
    }
    Object.assign(runs, { slices: Int32Array.from(slices), edges: Int32Array.from(edges) });
  }

  // Pieces thinner than a pixel merge into their area, like those beyond the slider.
  const isToldApart = (piece, leastSize) =>
    piece.index === state.chosen || (piece.index < state.numShown && piece.size >= leastSize);
  const sizeOfPixel = () => (view.high - view.low) / (plot.height * plot.ratio);

  // The area at a height of a slice, and the piece if there is one.
  function findAt(slice, height) {
    const leastSize = sizeOfPixel();
    let bottom = 0;
    for (let index = 0; index < areas.length; index++) {
      if (!areas[index].shown) continue;
      const top = bottom + areas[index].values[slice];
      if (height < top) {
        let low = bottom;
        for (const piece of stackOrder[index]) {
          if (piece.start > slice) break;
          if (piece.end <= slice || !isToldApart(piece, leastSize)) continue;
          const high = Math.min(low + piece.size, top);
          if (height < high) return { area: index, piece };
          low = high;
        }
        return { area: index, piece: null };
      }
      bottom = top;
    }
    return null;
  }

  function findPeak() {
    let best = 0;
    for (let slice = 1; slice < numSlices; slice++) if (totals[slice] > totals[best]) best = slice;
    return best;
  }

  function setView(start, stop, low = view.low, high = view.high) {
    const least = (end - first) / Math.max(numSlices, 1) / 4;
    const span = Math.min(Math.max(stop - start, least), end - first);
    const from = Math.min(Math.max(start, first), end - span);
    const rise = Math.min(high - low, state.top);
    const floor = Math.min(Math.max(low, 0), state.top - rise);
    Object.assign(view, { start: from, end: from + span, low: floor, high: floor + rise });
  }

  const isInPlot = (x, y) =>
    x >= plot.left && x <= plot.left + plot.width && y >= plot.top && y <= plot.top + plot.height;
  const toX = (time) => plot.left + ((time - view.start) / (view.end - view.start)) * plot.width;
  const toY = (height) => plot.top + plot.height * (1 - (height - view.low) / (view.high - view.low));

  sumUp();
  return {
    part, times, numSlices, areas, line, pieces, stackOrder, lanes: part.stretches, first, end, totals, view, state, plot,
    runs, formatHeight, formatTime, timeOf, findUnit, sumUp, findRun, chooseRuns, isToldApart, sizeOfPixel, findAt,
    findPeak, setView, isInPlot, toX, toY,
  };
}

charts.timeline = (root, part, page) => {
  const find = (selector) => root.querySelector(selector);
  const model = layTimeline(part, page);
  const { areas, line, pieces, view, state, plot, first, end } = model;
  const [back, front, detail, shown] = ["canvas.back", "canvas.front", "input", ".shown"].map(find);
  const painter = makeTimelinePainter(model, back, front, page);
  const redraw = plotting.onceAFrame(painter.draw);
  // A page with a single chart has a table of the largest pieces.
  const rows = part.isAlone ? [...document.querySelectorAll("#pieces tbody tr")] : [];

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
    rows.forEach((row, at) => row.setAttribute("aria-selected", String(at === state.chosen)));
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

  function listenToLegend() {
    for (const button of root.querySelectorAll(".legend button")) {
      const what = areas[Number(button.dataset.group)] ?? line;
      what.button = button;
      button.addEventListener("click", () => toggle(what));
    }
  }

  // Selecting a row marks its piece in the chart.
  function listenToTable() {
    rows.forEach((row, at) => {
      row.tabIndex = 0;
      row.setAttribute("aria-selected", "false");
      row.addEventListener("click", () => choose(at));
      row.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        choose(at);
      });
    });
  }

  function listen() {
    detail.value = part.detail * 100;
    find(".whole").addEventListener("click", reset);
    listenToLegend();
    listenToTable();
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
      wheelIsFree: part.isAlone,
    });
  }

  listen();
  painter.readTheme();
  painter.draw();
  setDetail(part.detail * 100);
  root.chart = {
    ...model,
    setView,
    zoom,
    choose,
    redraw: () => {
      painter.readTheme();
      painter.draw();
    },
  };
  return root.chart;
};
