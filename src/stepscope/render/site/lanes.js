// One step as a chart: its data, lookup by time, and interaction. lanes_painter.js draws it.

// Unpacks the tracks, whose spans are columns.
function layLanes(part) {
  // The shortest view: kernels start on whole nanoseconds, so a closer zoom shows nothing new.
  const LEAST_VIEW_NS = 50;
  const spanNs = Math.max(part.span, 1);
  // Two steps next to each other share the scale of the longer one.
  const roomNs = Math.max(spanNs, part.longest ?? 0);
  const groups = part.groups;
  const expand = (column, length, Kind) =>
    Array.isArray(column) ? Kind.from(column) : new Kind(length).fill(column);

  // Starts and ends are sums of gaps and lengths, which are exact: a step has far fewer than 2^53 nanoseconds.
  function unpack(track) {
    const count = track.length.length;
    const starts = new Float64Array(count);
    const ends = new Float64Array(count);
    for (let at = 0, now = 0; at < count; at++) {
      starts[at] = now + track.gap[at];
      now = ends[at] = starts[at] + track.length[at];
    }
    const own = { label: track.label, kind: track.kind, size: count, starts, ends };
    own.names = expand(track.name, count, Uint32Array);
    own.groups = expand(track.group, count, Uint16Array);
    own.counts = expand(track.count, count, Uint32Array);
    own.origins = expand(track.origin, count, Int32Array);
    return own;
  }

  const tracks = part.tracks.map(unpack);

  // The first span that ends after a time: the spans of a track are sorted and do not overlap.
  function findFirst(track, time) {
    let low = 0;
    let high = track.size;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (track.ends[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // The span at a time, or the nearest within `slack`, because a span can be thinner than a pixel; -1 if there is none.
  function findAt(track, time, slack) {
    const at = findFirst(track, time);
    if (at < track.size && track.starts[at] <= time) return at;
    const after = at < track.size ? track.starts[at] - time : Infinity;
    const before = at > 0 ? time - track.ends[at - 1] : Infinity;
    if (Math.min(before, after) > slack) return -1;
    return before < after ? at - 1 : at;
  }

  // The tracks with kernels: streams, without streams the CPU, otherwise all tracks.
  const told = ["stream", "host"]
    .map((kind) => tracks.filter((track) => track.kind === kind))
    .find((found) => found.length) || tracks;

  // The visible range, the position of the plot in the canvas, and the state of the pointer.
  const view = { start: 0, end: roomNs };
  const plot = { left: 0, top: 0, width: 1, height: 1, all: 1, total: 1, ratio: 1 };
  const state = { pointer: null, found: null, only: -1, isTelling: false };
  const toX = (time) => plot.left + ((time - view.start) / (view.end - view.start)) * plot.width;
  const toTime = (x) => view.start + ((x - plot.left) / plot.width) * (view.end - view.start);
  const isWhole = () => view.end - view.start >= roomNs;

  function setView(start, stop) {
    const length = Math.min(Math.max(stop - start, Math.min(LEAST_VIEW_NS, roomNs)), roomNs);
    const from = Math.min(Math.max(start, 0), roomNs - length);
    Object.assign(view, { start: from, end: from + length });
  }

  return { part, spanNs, roomNs, tracks, told, groups, findFirst, findAt, view, plot, state, toX, toTime, isWhole, setView };
}

charts.lanes = (root, part, page) => {
  const find = (selector) => root.querySelector(selector);
  const [map, back, front] = ["map", "back", "front"].map((name) => find(`canvas.${name}`));
  if (!back) return (root.chart = { redraw() {} });
  const [status, linked, whole] = [".status", ".linked", ".whole"].map(find);
  const model = layLanes(part);
  const { tracks, spanNs, roomNs, view, plot, state } = model;
  const painter = makeLanesPainter(model, { map, back, front }, page);
  const redraw = plotting.onceAFrame(painter.draw);

  // ---- the view

  function setView(start, stop) {
    model.setView(start, stop);
    sayWhere();
    redraw();
  }

  // Invisible rather than removed while the whole step is in view, so that the layout does not move.
  function sayWhere() {
    const length = Math.round(view.end - view.start);
    whole.style.visibility = model.isWhole() ? "hidden" : "visible";
    status.textContent = model.isWhole()
      ? `Whole ${part.unit}, ${page.formatTime(spanNs)}`
      : `${formatExactly(length)} of ${page.formatTime(spanNs)}, from ${formatExactly(Math.round(view.start))}`;
  }

  function zoom(factor, share = { x: 0.5 }) {
    const at = view.start + share.x * (view.end - view.start);
    setView(at - (at - view.start) * factor, at + (view.end - at) * factor);
  }

  function pan(across) {
    const along = across * (view.end - view.start);
    setView(view.start + along, view.end + along);
  }

  const reset = () => setView(0, roomNs);

  // ---- the span selected by pointer or keys

  function describeSpan({ track: row, at }) {
    const track = tracks[row];
    const [start, length] = [track.starts[at], track.ends[at] - track.starts[at]];
    const group = model.groups[track.groups[at]];
    const detail = part.details[track.names[at]] || "";
    const share = length / spanNs >= 0.01 ? page.formatShare(length / spanNs) : `${page.formatNumber((100 * length) / spanNs)}%`;
    const lines = [{ text: part.names[track.names[at]], className: "name" }];
    if (group && group !== part.names[track.names[at]]) lines.push({ text: group, colour: page.colourOf(group) });
    lines.push(`${formatExactly(length)}, ${share} of the ${part.unit}`, `from ${formatExactly(start)}`);
    const count = page.formatNumber(track.counts[at], 0);
    if (track.counts[at] > 1) lines.push(track.kind === "stream" ? `${count} kernels, drawn as one` : `${count} ${page.what}`);
    for (const line of part.origins[track.origins[at]] ?? []) lines.push(part.lines[line]);
    for (const text of detail ? detail.split("\n") : []) lines.push({ text, className: "of" });
    return [...lines, { text: track.label, className: "of" }];
  }

  // A label has its own tooltip, because it can be cut off.
  function point(place, event) {
    const isLabel = place && place.x < plot.left;
    state.pointer = isLabel ? null : place;
    state.found = state.pointer && findUnder(place);
    painter.drawPointer();
    const label = isLabel && tracks[findRow(place.y)]?.label;
    const lines = state.found ? describeSpan(state.found) : label ? [label] : null;
    if (lines) page.tip.show(event.clientX, event.clientY, lines);
    else if (state.isTelling) page.tip.hide();
    state.isTelling = lines !== null;
  }

  const findRow = (y) => tracks.findIndex((track) => y >= track.y && y < track.y + track.height);

  // A span can be thinner than a pixel, so the search extends two pixels to both sides.
  function findUnder({ x, y }) {
    const row = findRow(y);
    if (row < 0) return null;
    const at = model.findAt(tracks[row], model.toTime(x), (2 / plot.width) * (view.end - view.start));
    return at < 0 ? null : { track: row, at };
  }

  // Selects the next or the previous span of the track, scrolls it into view and announces it.
  function step(by) {
    const row = state.found?.track ?? tracks.findIndex((track) => track === model.told[0]);
    const track = tracks[row];
    if (!track?.size) return;
    const from = state.found ? state.found.at + by : model.findFirst(track, view.start);
    const at = Math.min(Math.max(from, 0), track.size - 1);
    const [start, end] = [track.starts[at], track.ends[at]];
    const isInView = start >= view.start && end <= view.end;
    const length = Math.min(view.end - view.start, Math.max((end - start) * 40, 2000));
    if (!isInView || (end - start) * plot.width < 3 * (view.end - view.start)) {
      setView((start + end - length) / 2, (start + end + length) / 2);
    }
    Object.assign(state, { found: { track: row, at }, pointer: null, isTelling: true });
    painter.draw();
    const lines = describeSpan(state.found);
    const box = back.getBoundingClientRect();
    page.tip.show(box.left + model.toX((start + end) / 2), box.top + track.y + track.height, lines);
    page.say(lines.map((line) => line.text ?? line).join(", "));
  }

  // Selects a span at the same time on another track.
  function changeTrack(by) {
    const row = (state.found?.track ?? (by > 0 ? -1 : tracks.length)) + by;
    if (row < 0 || row >= tracks.length || !tracks[row].size) return;
    const now = state.found ? tracks[state.found.track].starts[state.found.at] : view.start;
    state.found = { track: row, at: Math.min(model.findFirst(tracks[row], now), tracks[row].size - 1) };
    step(0);
  }

  function showSpan() {
    if (!state.found) return;
    const track = tracks[state.found.track];
    const [start, end] = [track.starts[state.found.at], track.ends[state.found.at]];
    setView(start - (end - start) * 0.15, end + (end - start) * 0.15);
  }

  // A click on a kernel narrows the breakdown to its class. A message says so, because the breakdown can be off screen.
  function click() {
    const track = state.found && tracks[state.found.track];
    const group = track && model.told.includes(track) ? model.groups[track.groups[state.found.at]] : "";
    const isNarrowed = group !== "" && page.narrow("class", group);
    linked.textContent = isNarrowed ? `The breakdown is narrowed to ${group}.` : "";
  }

  // ---- around the canvas

  // A legend button shows only its group; pressed again, all groups.
  function listenToLegend() {
    const buttons = [...root.querySelectorAll(".legend button")];
    for (const button of buttons) {
      button.addEventListener("click", () => {
        const group = Number(button.dataset.group);
        state.only = state.only === group ? -1 : group;
        for (const other of buttons) other.setAttribute("aria-pressed", String(other === button && state.only >= 0));
        painter.forgetMap();
        redraw();
      });
    }
  }

  // Dragging its middle moves the window, and dragging its sides resizes it; a press elsewhere centres it there.
  function listenToMap() {
    let grip = null;
    const timeAt = (event) => ((event.offsetX - plot.left) / plot.width) * roomNs;
    const move = (event) => {
      const time = timeAt(event);
      if (grip.side === "start") setView(Math.min(time, view.end - 1), view.end);
      else if (grip.side === "end") setView(view.start, Math.max(time, view.start + 1));
      else setView(time - grip.ahead, time - grip.ahead + view.end - view.start);
    };
    map.addEventListener("pointerdown", (event) => {
      map.setPointerCapture(event.pointerId);
      const time = timeAt(event);
      const slack = (6 / plot.width) * roomNs;
      const isInside = time >= view.start && time <= view.end;
      const side = Math.abs(time - view.start) < slack ? "start" : Math.abs(time - view.end) < slack ? "end" : "";
      grip = { side, ahead: isInside ? time - view.start : (view.end - view.start) / 2 };
      move(event);
    });
    map.addEventListener("pointermove", (event) => grip && move(event));
    for (const name of ["pointerup", "pointercancel"]) map.addEventListener(name, () => (grip = null));
    map.addEventListener("dblclick", reset);
  }

  function listen() {
    const keys = { n: () => step(1), p: () => step(-1), f: showSpan, Enter: showSpan };
    keys.ArrowDown = () => changeTrack(1);
    keys.ArrowUp = () => changeTrack(-1);
    keys.Escape = () => {
      Object.assign(state, { found: null, isTelling: false });
      page.tip.hide();
      painter.drawPointer();
      back.blur();
    };
    plotting.makeMovable(back, { frame: () => plot, zoom, pan, reset, isWhole: model.isWhole, point, click, keys });
    whole.addEventListener("click", reset);
    listenToLegend();
    listenToMap();
  }

  function redrawAll() {
    painter.readTheme();
    painter.draw();
  }

  listen();
  sayWhere();
  redrawAll();
  root.chart = { ...model, setView, zoom, step, redraw: redrawAll };
  return root.chart;
};
