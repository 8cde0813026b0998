// Draws a timeline and its pointer from the layout in timeline.js.
function makeTimelinePainter(model, back, front, page) {
  const { part, areas, line, lanes, view, state, plot, runs, numSlices, times, totals } = model;
  const { formatHeight, formatTime, toX, toY, timeOf } = model;
  const { pack, rule, fitText } = plotting;
  const LANE = 18;
  let pixels = null;
  let layer = null;
  let names = [];
  let theme = null;

  function readTheme() {
    theme = { ...page.theme() };
    const paper = parseColour(theme.paper);
    const dark = paper[0] < 128;
    theme.fills = areas.map((area) => {
      const colour = parseColour(page.colourOf(area.name));
      const tint = (share) => pack(mixColours(colour, paper, share));
      const edge = pack(mixColours(colour, [0, 0, 0], dark ? 0.55 : 0.3));
      return { rest: tint(dark ? 0.4 : 0.45), tints: [tint(0.12), tint(0.28)], edge };
    });
    theme.chosen = pack(dark ? [255, 236, 170] : [40, 40, 40]);
  }

  function fit() {
    const width = back.parentElement.clientWidth;
    const ratio = plotting.findRatio();
    const numLanes = 1 + Math.max(-1, ...lanes.map((stretch) => stretch.lane));
    const height = Math.round(Math.min(560, Math.max(300, width * 0.42)) + numLanes * LANE);
    const left = 62;
    const top = 10 + numLanes * LANE;
    const size = { left, top, width: Math.max(50, width - left - 20), height: height - top - 44 };
    Object.assign(plot, size, { ratio, all: width, total: height });
    const [columns, rows] = [Math.round(plot.width * ratio), Math.round(plot.height * ratio)];
    if (pixels && pixels.width === columns && pixels.height === rows) return;
    pixels = new ImageData(columns, rows);
    layer = Object.assign(document.createElement("canvas"), { width: columns, height: rows });
  }

  function fillCells(words, from, to, low, high, colour) {
    const width = pixels.width;
    const last = Math.min(pixels.height, Math.round(low)) * width;
    for (let row = Math.max(0, Math.round(high)) * width; row < last; row += width) {
      // A call costs more than a pixel or two.
      if (to - from > 16) words.fill(colour, row + from, row + to);
      else for (let at = row + from; at < row + to; at++) words[at] = colour;
    }
  }

  function paintAreas() {
    names = [];
    const words = new Uint32Array(pixels.data.buffer).fill(0);
    const perPixel = model.sizeOfPixel();
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
      for (const piece of model.stackOrder[index]) {
        if (model.isToldApart(piece, perPixel)) paintPiece(words, piece, turn++, filled, tops, toRow);
      }
      filled.set(tops);
    });
  }

  // Fills one piece over its runs, with a line along its top and its sides.
  function paintPiece(words, piece, turn, filled, tops, toRow) {
    const fills = theme.fills[piece.area];
    const chosen = piece.index === state.chosen;
    const from = model.findRun(piece.start);
    const to = model.findRun(piece.end);
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

  // Writes the name of a piece in its longest straight part, if there is room.
  function drawNames(context) {
    Object.assign(context, { textAlign: "center", textBaseline: "middle" });
    for (const { piece, fill, left, right, low, high } of names) {
      const [width, height] = [(right - left) / plot.ratio - 10, (low - high) / plot.ratio];
      const y = plot.top + (low + high) / 2 / plot.ratio;
      if (height < 15 || width < 50 || y < plot.top + 8 || y > plot.top + plot.height - 8) continue;
      context.fillStyle = inkOn([fill & 255, (fill >> 8) & 255, (fill >> 16) & 255]);
      const size = `, ${formatHeight(piece.size)}`;
      const label = fitText(context, piece.label, width - context.measureText(size).width);
      if (label) context.fillText(label + size, plot.left + (left + right) / 2 / plot.ratio, y);
    }
  }

  function draw() {
    const began = performance.now();
    fit();
    const context = plotting.openCanvas(back, plot.all, plot.total);
    model.chooseRuns();
    drawAxes(context);
    if (numSlices) {
      paintAreas();
      // Through another canvas: putImageData would replace the grid with transparent pixels.
      layer.getContext("2d").putImageData(pixels, 0, 0);
      context.drawImage(layer, plot.left, plot.top, plot.width, plot.height);
      drawStretches(context);
      drawNames(context);
      if (line && line.shown) drawLine(context);
      drawPeak(context);
    } else {
      Object.assign(context, { textAlign: "center", textBaseline: "middle", fillStyle: theme.faint });
      context.fillText("Nothing to draw.", plot.left + plot.width / 2, plot.top + plot.height / 2);
    }
    drawPointer();
    back.dataset.frameMs = (performance.now() - began).toFixed(1);
  }

  function drawAxes(context) {
    const [unit, unitSize] = model.findUnit();
    const most = Math.max(3, Math.round(plot.height / 50));
    const heights = page.makeTicks(view.low / unitSize, view.high / unitSize, most);
    Object.assign(context, { fillStyle: theme.faint, strokeStyle: theme.grid, lineWidth: 1 });
    Object.assign(context, { textAlign: "right", textBaseline: "middle" });
    for (const tick of heights.ticks) {
      const y = Math.round(toY(tick * unitSize)) + 0.5;
      rule(context, plot.left, y, plot.left + plot.width, y);
      context.fillText(page.formatNumber(tick, heights.decimals), plot.left - 7, y);
    }
    Object.assign(context, { textAlign: "center", textBaseline: "top", strokeStyle: theme.hatch });
    const bottom = plot.top + plot.height;
    const moments = page.makeTicks(view.start, view.end, Math.max(2, Math.round(plot.width / 90)));
    for (const tick of numSlices > 1 ? moments.ticks : []) {
      rule(context, toX(tick), bottom, toX(tick), bottom + 5);
      context.fillText(page.formatNumber(tick, moments.decimals), toX(tick), bottom + 8);
    }
    rule(context, plot.left, bottom + 0.5, plot.left + plot.width, bottom + 0.5);
    context.fillStyle = theme.ink;
    const label = part.xUnit ? `${part.xLabel} (${part.xUnit})` : part.xLabel;
    context.fillText(label, plot.left + plot.width / 2, bottom + 26);
    context.save();
    context.translate(4, plot.top + plot.height / 2);
    context.rotate(-Math.PI / 2);
    context.fillText(unit ? `${part.yLabel} (${unit})` : part.yLabel, 0, 0);
    context.restore();
  }

  function drawStretches(context) {
    Object.assign(context, { strokeStyle: theme.hatch, fillStyle: theme.faint });
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

  function drawLine(context) {
    context.save();
    context.beginPath();
    context.rect(plot.left, plot.top - 1, plot.width, plot.height + 2);
    context.clip();
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

  // The peak of the visible areas: with an area hidden it can differ from the peak in the heading.
  function drawPeak(context) {
    const best = model.findPeak();
    const x = toX((times[best] + timeOf(best + 1)) / 2);
    const y = toY(totals[best]);
    if (!totals[best] || !model.isInPlot(x, y)) return;
    Object.assign(context, { fillStyle: theme.ink, strokeStyle: theme.paper, lineWidth: 1.5 });
    context.beginPath();
    context.arc(x, y, 4, 0, 7);
    context.fill();
    context.stroke();
    const text = `peak ${formatHeight(totals[best])} at ${formatTime(times[best])}`;
    context.font = plotting.BOLD_FONT;
    const half = context.measureText(text).width / 2 + 4;
    const place = Math.min(Math.max(x, plot.left + half), plot.left + plot.width - half);
    const level = Math.max(plot.top + 8, Math.min(y - 14, highestOfLine(place - half, place + half) - 10));
    Object.assign(context, { textAlign: "center", textBaseline: "middle", lineWidth: 4, lineJoin: "round" });
    context.strokeText(text, place, level);
    context.fillText(text, place, level);
  }

  // The highest point of the line between two places: a label goes above it.
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
    const context = plotting.openCanvas(front, plot.all, plot.total);
    if (!state.pointer || !numSlices || !model.isInPlot(state.pointer.x, state.pointer.y)) {
      if (state.isTelling) page.tip.hide();
      state.isTelling = false;
      return;
    }
    const { x, y } = state.pointer;
    Object.assign(context, { strokeStyle: theme.ink, lineWidth: 0.7, globalAlpha: 0.6 });
    rule(context, x, plot.top, x, plot.top + plot.height);
    const column = (x - plot.left) * plot.ratio;
    let run = 0;
    while (run < runs.slices.length - 1 && runs.edges[run + 1] <= column) run++;
    const height = view.low + (1 - (y - plot.top) / plot.height) * (view.high - view.low);
    const box = back.getBoundingClientRect();
    page.tip.show(box.left + x, box.top + y, describe(runs.slices[run], model.findAt(runs.slices[run], height)));
    state.isTelling = true;
  }

  // The tooltip for the pointer, as lines.
  function describe(slice, found) {
    const lines = [];
    if (found && found.piece) {
      const { label, size, start, end, detail } = found.piece;
      lines.push({ text: label, className: "name" }, formatHeight(size));
      lines.push({ text: `from ${formatTime(timeOf(start))} to ${formatTime(timeOf(end))}`, className: "of" });
      for (const text of detail) lines.push({ text, className: "of" });
    }
    if (found) {
      const { name, values } = areas[found.area];
      lines.push({ text: `${name}: ${formatHeight(values[slice])}`, className: found.piece ? "" : "name" });
    }
    lines.push(`total ${formatHeight(totals[slice])} at ${formatTime(times[slice])}`);
    if (line) lines.push({ text: `${line.name} ${formatHeight(line.values[slice])}`, className: "of" });
    return lines;
  }

  return { readTheme, draw, drawPointer };
}
