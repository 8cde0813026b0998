// Draws the page of a timeline, and what is under the pointer. One script with timeline.js, which comes before it.

const parse = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
const mix = (colour, other, share) => colour.map((own, at) => Math.round(own + (other[at] - own) * share));
const pack = ([red, green, blue]) => ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => [name, style.getPropertyValue(`--${name}`).trim()];
  const colours = Object.fromEntries(["paper", "ink", "faint", "frame", "grid"].map(read));
  const paper = parse(colours.paper);
  const dark = paper[0] < 128;
  colours.fills = areas.map((area) => {
    const colour = parse(area.colour);
    const tint = (share) => pack(mix(colour, paper, share));
    const edge = pack(mix(colour, [0, 0, 0], dark ? 0.55 : 0.3));
    return { rest: tint(dark ? 0.4 : 0.45), tints: [tint(0.12), tint(0.28)], edge };
  });
  colours.chosen = pack(dark ? [255, 236, 170] : [40, 40, 40]);
  return colours;
}

function resize() {
  const width = back.parentElement.clientWidth;
  const ratio = Math.min(window.devicePixelRatio || 1, 3);
  if (back.width === Math.round(width * ratio) && plot.ratio === ratio && pixels) return;
  const numLanes = 1 + Math.max(-1, ...lanes.map((stretch) => stretch.lane));
  const height = Math.round(Math.min(560, Math.max(300, width * 0.42)) + numLanes * LANE);
  for (const canvas of [back, front]) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const left = 62;
  const top = 10 + numLanes * LANE;
  plot = { left, top, width: Math.max(50, width - left - 20), height: height - top - 44, ratio, total: height };
  pixels = new ImageData(Math.round(plot.width * ratio), Math.round(plot.height * ratio));
  layer = Object.assign(document.createElement("canvas"), { width: pixels.width, height: pixels.height });
  redraw();
}

function fillCells(words, from, to, low, high, colour) {
  const width = pixels.width;
  const last = Math.min(pixels.height, Math.round(low)) * width;
  for (let row = Math.max(0, Math.round(high)) * width; row < last; row += width) {
    // A call for a pixel or two costs more than the pixels.
    if (to - from > 16) words.fill(colour, row + from, row + to);
    else for (let at = row + from; at < row + to; at++) words[at] = colour;
  }
}

function paintAreas() {
  names = [];
  const words = new Uint32Array(pixels.data.buffer).fill(0);
  const perPixel = sizeOfPixel();
  const toRow = (height) => pixels.height - (height - view.low) / perPixel;
  const count = runs.slices.length;
  const filled = new Float64Array(count);
  const tops = new Float64Array(count);
  areas.forEach((area, index) => {
    if (!area.shown) return;
    for (let run = 0; run < count; run++) {
      tops[run] = filled[run] + area.values[runs.slices[run]];
      const [left, right] = [runs.edges[run], runs.edges[run + 1]];
      fillCells(words, left, right, toRow(filled[run]), toRow(tops[run]), theme.fills[index].rest);
    }
    let turn = 0;
    for (const piece of stackOrder[index]) {
      if (isToldApart(piece, perPixel)) paintPiece(words, piece, turn++, filled, tops, toRow);
    }
    filled.set(tops);
  });
}

// One piece over the runs it lives in, with a line along its top and its sides.
function paintPiece(words, piece, turn, filled, tops, toRow) {
  const fills = theme.fills[piece.area];
  const chosen = piece.index === state.chosen;
  const from = findRun(piece.start);
  const to = findRun(piece.end);
  const stroke = Math.max(1, Math.round(plot.ratio * (chosen ? 2 : 0.75)));
  const fill = fills.tints[turn & 1];
  const edge = chosen ? theme.chosen : fills.edge;
  const wide = runs.edges[to] - runs.edges[from] > 3 * stroke;
  const passage = { piece, fill, left: 0, right: 0, low: 0, high: 0 };
  let straightFrom = from;
  let filledBefore = 0;
  for (let run = from; run < to; run++) {
    const bottom = filled[run];
    const top = Math.min(bottom + piece.size, tops[run]);
    filled[run] = top;
    const [low, high] = [toRow(bottom), toRow(top)];
    const [left, right] = [runs.edges[run], runs.edges[run + 1]];
    fillCells(words, left, right, low, high, chosen ? edge : fill);
    if (chosen && low - high > 2 * stroke + 1 && wide) fillCells(words, left, right, low - stroke, high + stroke, fill);
    else if (!chosen && low - high > 2.5 * stroke && wide) fillCells(words, left, right, high + stroke, high, edge);
    if (run > from && bottom !== filledBefore) straightFrom = run;
    filledBefore = bottom;
    if (right - runs.edges[straightFrom] > passage.right - passage.left) {
      Object.assign(passage, { left: runs.edges[straightFrom], right, low, high });
    }
    if (wide && run === from) fillCells(words, left, left + stroke, low, high, edge);
    if (wide && run === to - 1) fillCells(words, right - stroke, right, low, high, edge);
  }
  names.push(passage);
}

// Names of pieces, each in the longest straight part of its piece, where that has room for one.
function drawNames(context) {
  Object.assign(context, { textAlign: "center", textBaseline: "middle" });
  for (const { piece, fill, left, right, low, high } of names) {
    const [width, height] = [(right - left) / plot.ratio - 10, (low - high) / plot.ratio];
    const y = plot.top + (low + high) / 2 / plot.ratio;
    if (height < 15 || width < 50 || y < plot.top + 8 || y > plot.top + plot.height - 8) continue;
    const bright = 0.299 * (fill & 255) + 0.587 * ((fill >> 8) & 255) + 0.114 * ((fill >> 16) & 255);
    context.fillStyle = bright > 125 ? "#222222" : "#ffffff";
    const size = `, ${formatHeight(piece.size)}`;
    const label = fitText(context, piece.label, width - context.measureText(size).width);
    if (label) context.fillText(label + size, plot.left + (left + right) / 2 / plot.ratio, y);
  }
}

const isInPlot = (x, y) =>
  x >= plot.left && x <= plot.left + plot.width && y >= plot.top && y <= plot.top + plot.height;
const toX = (time) => plot.left + ((time - view.start) / (view.end - view.start)) * plot.width;
const toY = (height) => plot.top + plot.height * (1 - (height - view.low) / (view.high - view.low));

function draw() {
  state.frame = 0;
  const began = performance.now();
  const context = back.getContext("2d");
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.clearRect(0, 0, back.width, back.height);
  chooseRuns();
  context.save();
  context.setTransform(plot.ratio, 0, 0, plot.ratio, 0, 0);
  context.font = FONT;
  context.direction = "ltr";
  drawAxes(context);
  if (numSlices) {
    paintAreas();
    // Through a canvas of its own, as pixels that are put directly replace the grid where they are transparent.
    layer.getContext("2d").putImageData(pixels, 0, 0);
    context.drawImage(layer, plot.left, plot.top, plot.width, plot.height);
    drawStretches(context);
    drawNames(context);
    if (line && line.shown) drawLine(context);
    drawPeak(context);
  }
  context.restore();
  drawPointer();
  back.dataset.frameMs = (performance.now() - began).toFixed(1);
}

function redraw() {
  if (!state.frame) state.frame = requestAnimationFrame(draw);
}

function rule(context, x1, y1, x2, y2) {
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
}

function drawAxes(context) {
  let [unit, unitSize] = [data.yUnit, 1];
  if (data.bytes) {
    let power = 0;
    while (view.high >= 1000 * 1024 ** power && power < UNITS.length - 1) power++;
    [unit, unitSize] = [UNITS[power], 1024 ** power];
  }
  const heights = makeTicks(view.low / unitSize, view.high / unitSize, Math.max(3, Math.round(plot.height / 50)));
  Object.assign(context, { fillStyle: theme.faint, strokeStyle: theme.grid, lineWidth: 1 });
  Object.assign(context, { textAlign: "right", textBaseline: "middle" });
  for (const tick of heights.ticks) {
    const y = Math.round(toY(tick * unitSize)) + 0.5;
    rule(context, plot.left, y, plot.left + plot.width, y);
    context.fillText(formatNumber(tick, heights.decimals), plot.left - 7, y);
  }
  Object.assign(context, { textAlign: "center", textBaseline: "top", strokeStyle: theme.frame });
  const bottom = plot.top + plot.height;
  const moments = makeTicks(view.start, view.end, Math.max(2, Math.round(plot.width / 90)));
  for (const tick of numSlices > 1 ? moments.ticks : []) {
    rule(context, toX(tick), bottom, toX(tick), bottom + 5);
    context.fillText(formatNumber(tick, moments.decimals), toX(tick), bottom + 8);
  }
  rule(context, plot.left, bottom + 0.5, plot.left + plot.width, bottom + 0.5);
  context.fillStyle = theme.ink;
  const label = data.xUnit ? `${data.xLabel} (${data.xUnit})` : data.xLabel;
  context.fillText(label, plot.left + plot.width / 2, bottom + 26);
  context.save();
  context.translate(4, plot.top + plot.height / 2);
  context.rotate(-Math.PI / 2);
  context.fillText(unit ? `${data.yLabel} (${unit})` : data.yLabel, 0, 0);
  context.restore();
}

function drawStretches(context) {
  Object.assign(context, { strokeStyle: theme.frame, fillStyle: theme.faint });
  Object.assign(context, { textAlign: "center", textBaseline: "middle" });
  const drawn = [];
  for (const stretch of lanes) {
    const start = Math.max(plot.left, toX(timeOf(stretch.start)));
    const stop = Math.min(plot.left + plot.width, toX(timeOf(stretch.end)));
    if (stop <= start) continue;
    const y = plot.top - 5 - stretch.lane * LANE;
    context.lineWidth = 1.2;
    rule(context, start + 1.5, y, Math.max(start + 2, stop - 1.5), y);
    const label = fitText(context, stretch.label, stop - start - 4);
    if (label) context.fillText(label, (start + stop) / 2, y - 8);
    context.lineWidth = 0.6;
    for (const x of [start, stop]) {
      const atFrame = x <= plot.left + 1 || x >= plot.left + plot.width - 1;
      if (atFrame || drawn.some((other) => Math.abs(other - x) < 4)) continue;
      drawn.push(x);
      rule(context, x, y, x, plot.top + plot.height);
    }
  }
}

function fitText(context, text, width) {
  if (width < 8 || context.measureText(text).width <= width) return width < 8 ? "" : text;
  let low = 0;
  let high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(`${text.slice(0, middle)}…`).width <= width) low = middle;
    else high = middle - 1;
  }
  return low >= 3 ? `${text.slice(0, low)}…` : "";
}

function clipToPlot(context) {
  context.save();
  context.beginPath();
  context.rect(plot.left, plot.top - 1, plot.width, plot.height + 2);
  context.clip();
}

function drawLine(context) {
  clipToPlot(context);
  context.beginPath();
  for (let run = 0; run < runs.slices.length; run++) {
    const y = toY(line.values[runs.slices[run]]);
    context.lineTo(plot.left + runs.edges[run] / plot.ratio, y);
    context.lineTo(plot.left + runs.edges[run + 1] / plot.ratio, y);
  }
  Object.assign(context, { strokeStyle: theme.ink, lineWidth: 1.3 });
  context.setLineDash([5, 3]);
  context.stroke();
  context.restore();
}

// The highest of what is shown: with an area switched off it is another instant than the peak in the heading.
function drawPeak(context) {
  let best = 0;
  for (let slice = 1; slice < numSlices; slice++) if (totals[slice] > totals[best]) best = slice;
  const x = toX((times[best] + timeOf(best + 1)) / 2);
  const y = toY(totals[best]);
  if (!totals[best] || !isInPlot(x, y)) return;
  Object.assign(context, { fillStyle: theme.ink, strokeStyle: theme.paper, lineWidth: 1.5 });
  context.beginPath();
  context.arc(x, y, 4, 0, 7);
  context.fill();
  context.stroke();
  const text = `peak ${formatHeight(totals[best])} at ${formatTime(times[best])}`;
  context.font = `bold ${FONT}`;
  const half = context.measureText(text).width / 2 + 4;
  const place = Math.min(Math.max(x, plot.left + half), plot.left + plot.width - half);
  const level = Math.max(plot.top + 8, Math.min(y - 14, highestOfLine(place - half, place + half) - 10));
  Object.assign(context, { textAlign: "center", textBaseline: "middle", lineWidth: 4, lineJoin: "round" });
  context.strokeText(text, place, level);
  context.fillText(text, place, level);
}

// How high on the canvas the line comes between two places: a label stands above it.
function highestOfLine(left, right) {
  let highest = Infinity;
  for (let run = 0; line && line.shown && run < runs.slices.length; run++) {
    const [start, stop] = [runs.edges[run], runs.edges[run + 1]].map((edge) => plot.left + edge / plot.ratio);
    if (stop >= left && start <= right) highest = Math.min(highest, toY(line.values[runs.slices[run]]));
  }
  return highest;
}

// ---- the pointer

function drawPointer() {
  const context = front.getContext("2d");
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.clearRect(0, 0, front.width, front.height);
  tip.hidden = true;
  if (!state.pointer || !numSlices) return;
  const { x, y } = state.pointer;
  if (!isInPlot(x, y)) return;
  context.setTransform(plot.ratio, 0, 0, plot.ratio, 0, 0);
  Object.assign(context, { strokeStyle: theme.ink, lineWidth: 0.7, globalAlpha: 0.6 });
  rule(context, x, plot.top, x, plot.top + plot.height);
  const column = (x - plot.left) * plot.ratio;
  let run = 0;
  while (run < runs.slices.length - 1 && runs.edges[run + 1] <= column) run++;
  const height = view.low + (1 - (y - plot.top) / plot.height) * (view.high - view.low);
  showTip(runs.slices[run], findAt(runs.slices[run], height), x, y);
}

function showTip(slice, found, x, y) {
  const rows = [];
  if (found && found.piece) {
    const { label, size, start, end: stop, detail } = found.piece;
    rows.push(element("p", label, "name"), element("p", formatHeight(size)));
    rows.push(element("p", `from ${formatTime(timeOf(start))} to ${formatTime(timeOf(stop))}`, "of"));
    for (const text of detail) rows.push(element("p", data.strings[text], "of"));
  }
  if (found) {
    const { name, values } = areas[found.area];
    rows.push(element("p", `${name}: ${formatHeight(values[slice])}`, found.piece ? "" : "name"));
  }
  rows.push(element("p", `total ${formatHeight(totals[slice])} at ${formatTime(times[slice])}`));
  if (line) rows.push(element("p", `${line.name} ${formatHeight(line.values[slice])}`, "of"));
  tip.replaceChildren(...rows);
  tip.hidden = false;
  const room = back.clientWidth;
  const left = x + 14 + tip.offsetWidth > room ? x - 14 - tip.offsetWidth : x + 14;
  tip.style.left = `${Math.max(0, Math.min(left, room - tip.offsetWidth))}px`;
  tip.style.top = `${Math.max(0, Math.min(y + 14, plot.total - tip.offsetHeight))}px`;
}
