// Draws one step as tracks, from the whole step down to a nanosecond.
//
// A track is one row of pixels, filled by a loop over the visible spans and stretched to its height: a frame costs the
// width of the canvas plus the number of visible spans, not the number of pixels. Where spans are thinner than a pixel, a
// column has the colour of its largest group, with the share of busy time as opacity. Idle time stays empty.
function makeLanesPainter(model, { map, back, front }, page) {
  const HEIGHTS = { phase: 24, layer: 20, module: 18, stream: 30, host: 20, rank: 20 };
  const [GAP, AXIS, LABEL_ROW, MAP_ROW, NARROW, LEAST_NAME] = [5, 30, 15, 9, 640, 13];
  const { rule } = plotting;
  const { part, tracks, spanNs, roomNs, view, plot, state } = model;
  const layer = document.createElement("canvas");
  const mapLayer = document.createElement("canvas");
  const widths = new Map();
  let theme = null;
  let mapIsStale = true;

  function readTheme() {
    theme = { ...page.theme() };
    const paper = parseColour(theme.paper);
    // Spans without a group only show their name, in a colour that stays in the background.
    theme.fills = model.groups.map((group) => mixColours(parseColour(page.colourOf(group)), paper, group ? 0 : 0.55));
    theme.quiet = theme.fills.map((fill) => mixColours(fill, paper, 0.82));
    mapIsStale = true;
  }

  function measureLabels() {
    const context = back.getContext("2d");
    context.font = plotting.FONT;
    return Math.max(...tracks.map((track) => measure(context, track.label)));
  }

  function fit() {
    const width = back.parentElement.clientWidth;
    const isNarrow = width < NARROW;
    const left = isNarrow ? 2 : Math.min(Math.max(92, measureLabels() + 14), width * 0.22);
    let y = AXIS;
    for (const track of tracks) {
      if (isNarrow) y += LABEL_ROW;
      Object.assign(track, { y, height: HEIGHTS[track.kind] });
      y += track.height + GAP;
    }
    const total = Math.max(y + 4, 90);
    Object.assign(plot, { left, top: AXIS, width: Math.max(60, width - left - 2), height: total - AXIS });
    Object.assign(plot, { all: width, total, isNarrow, ratio: plotting.findRatio() });
  }

  // ---- pixels

  // Fills one row of pixels for a track from `start` to `end`; `wide` receives the spans with room for a name.
  function paintRow(words, offset, columns, track, start, end, wide) {
    const perNs = columns / (end - start);
    const shares = new Float64Array(model.groups.length);
    let column = -1;
    const close = () => {
      if (column < 0) return;
      let [best, sum] = [0, 0];
      for (let group = 0; group < shares.length; group++) {
        sum += shares[group];
        if (shares[group] > shares[best]) best = group;
      }
      const fill = state.only < 0 || state.only === best ? theme.fills[best] : theme.quiet[best];
      words[offset + column] = plotting.pack(fill, Math.round(255 * Math.min(1, 0.25 + 0.75 * sum)));
      shares.fill(0);
      column = -1;
    };
    for (let at = model.findFirst(track, start); at < track.size && track.starts[at] < end; at++) {
      const left = Math.max(0, (track.starts[at] - start) * perNs);
      const right = Math.min(columns, (track.ends[at] - start) * perNs);
      const group = track.groups[at];
      if (right - left < 1.5) {
        const own = Math.min(columns - 1, Math.floor(left));
        if (own !== column) close();
        column = own;
        shares[group] += Math.min(1, Math.max(right - left, 0.02));
        continue;
      }
      close();
      const [from, to] = [Math.round(left), Math.max(Math.round(left) + 1, Math.round(right))];
      const fill = state.only < 0 || state.only === group ? theme.fills[group] : theme.quiet[group];
      words.fill(plotting.pack(fill), offset + from, offset + to);
      // A hairline between neighbours that are wide enough for it.
      if (to - from > 4 && track.starts[at] > start) words[offset + from] = plotting.pack(fill, 70);
      if (wide && to - from >= LEAST_NAME * plot.ratio) wide.push({ at, from, to, fill });
    }
    close();
  }

  function paint(canvas, chosen, columns, start, end, wide) {
    const image = new ImageData(columns, Math.max(chosen.length, 1));
    const words = new Uint32Array(image.data.buffer);
    chosen.forEach((track, row) => {
      paintRow(words, row * columns, columns, track, start, end, wide?.[row]);
    });
    Object.assign(canvas, { width: columns, height: Math.max(chosen.length, 1) });
    canvas.getContext("2d").putImageData(image, 0, 0);
  }

  function draw() {
    const began = performance.now();
    fit();
    const context = plotting.openCanvas(back, plot.all, plot.total);
    drawAxis(context);
    const columns = Math.round(plot.width * plot.ratio);
    const wide = tracks.map(() => []);
    paint(layer, tracks, columns, view.start, view.end, wide);
    context.imageSmoothingEnabled = false;
    tracks.forEach((track, row) => {
      context.drawImage(layer, 0, row, columns, 1, plot.left, track.y, plot.width, track.height);
      drawLabel(context, track);
      drawNames(context, track, wide[row]);
    });
    drawEnd(context);
    drawMap();
    drawPointer();
    back.dataset.frameMs = (performance.now() - began).toFixed(2);
  }

  // Ticks at round times, in the unit that keeps them short.
  function drawAxis(context) {
    const length = view.end - view.start;
    const [unit, size] = length >= 2e6 ? ["ms", 1e6] : length >= 2e3 ? ["µs", 1e3] : ["ns", 1];
    const { ticks, decimals } = page.makeTicks(view.start / size, view.end / size, Math.max(2, plot.width / 90));
    Object.assign(context, { strokeStyle: theme.grid, fillStyle: theme.faint, lineWidth: 1, textAlign: "left" });
    for (const tick of ticks) {
      const x = Math.round(model.toX(tick * size)) + 0.5;
      rule(context, x, 14, x, plot.total);
      const text = `${page.formatNumber(tick, decimals)} ${unit}`;
      if (x + 4 + context.measureText(text).width <= plot.all) context.fillText(text, x + 4, 16);
    }
  }

  // Marks the end of a step that is shorter than the scale: the rest is not idle time.
  function drawEnd(context) {
    const x = Math.round(model.toX(spanNs)) + 0.5;
    if (roomNs === spanNs || x > plot.left + plot.width) return;
    Object.assign(context, { strokeStyle: theme.faint, fillStyle: theme.faint, lineWidth: 1, textAlign: "left" });
    context.setLineDash([3, 3]);
    rule(context, x, AXIS - 4, x, plot.total);
    context.setLineDash([]);
    const room = plot.left + plot.width - x - 8;
    context.fillText(plotting.fitText(context, `end of ${part.unit}`, room), x + 6, tracks[0].y + tracks[0].height / 2);
  }

  function drawLabel(context, track) {
    Object.assign(context, { fillStyle: theme.faint, textAlign: plot.isNarrow ? "left" : "right" });
    const [x, y] = plot.isNarrow ? [plot.left, track.y - 7] : [plot.left - 9, track.y + track.height / 2 + 0.5];
    if (plot.isNarrow) {
      // On top of the grid, which would cross the letters.
      const width = context.measureText(track.label).width;
      context.clearRect(x, y - 7, width + 3, 13);
    }
    const room = plot.isNarrow ? plot.width : plot.left - 12;
    context.fillText(plotting.fitText(context, track.label, room), x, y);
  }

  // Names are in the visible part of their span, so that a long span keeps its name at any zoom.
  function drawNames(context, track, wide) {
    const isCentred = track.kind !== "stream" && track.kind !== "host";
    const roomIn = ({ from, to }) => (to - from) / plot.ratio - (isCentred ? 4 : 10);
    const nameOf = ({ at }) => part.names[track.names[at]];
    // If one layer needs its number instead of its name, all layers get numbers; if one has no room for its number, none
    // does, because readers would take a few numbers for a count.
    const areShort = track.kind === "layer" && wide.some((span) => measure(context, nameOf(span)) > roomIn(span));
    const lastOf = (name) => name.split(".").at(-1);
    const least = areShort ? Math.max(...wide.map((span) => measure(context, lastOf(nameOf(span))))) : 0;
    context.textAlign = "left";
    for (const span of wide) {
      const { from, fill } = span;
      const room = roomIn(span);
      const name = areShort ? lastOf(nameOf(span)) : nameOf(span);
      if (room < least) continue;
      const text = shorten(context, track, name, room);
      if (!text) continue;
      context.fillStyle = inkOn(fill);
      const shift = isCentred ? (room - measure(context, text)) / 2 + 2 : 5;
      const x = plot.left + from / plot.ratio + shift;
      context.fillText(text, x, track.y + track.height / 2 + 0.5);
    }
  }

  // Each name is measured once: measuring text takes longer than the rest of a frame.
  function measure(context, text) {
    if (!widths.has(text)) widths.set(text, context.measureText(text).width);
    return widths.get(text);
  }

  // A path that does not fit loses its start (`blocks.2.mlp` becomes `mlp`), other names lose their end.
  function shorten(context, track, text, room) {
    if (measure(context, text) <= room) return text;
    if (track.kind === "layer" || track.kind === "module") {
      const parts = text.split(".");
      const kept = parts.map((_, at) => parts.slice(at).join(".")).find((tail) => measure(context, tail) <= room);
      return kept ?? "";
    }
    const kept = Math.floor((text.length * (room - 11)) / measure(context, text));
    return kept >= 3 ? plotting.fitText(context, text.slice(0, kept + 4), room) : "";
  }

  // ---- the map: the whole step, with the visible range

  function paintMap() {
    const rows = model.told.slice(0, 4);
    paint(mapLayer, rows, Math.round(plot.width * plotting.findRatio()), 0, roomNs, null);
    plot.mapRows = rows.length;
    plot.mapHeight = 8 + rows.length * MAP_ROW + (rows.length - 1) * 2;
  }

  function drawMap() {
    const columns = Math.round(plot.width * plot.ratio);
    if (mapLayer.width !== columns || mapIsStale) paintMap();
    mapIsStale = false;
    const context = plotting.openCanvas(map, plot.all, plot.mapHeight);
    context.imageSmoothingEnabled = false;
    for (let row = 0; row < plot.mapRows; row++) {
      const y = 4 + row * (MAP_ROW + 2);
      context.drawImage(mapLayer, 0, row, mapLayer.width, 1, plot.left, y, plot.width, MAP_ROW);
    }
    const [left, right] = [view.start, view.end].map((time) => plot.left + (time / roomNs) * plot.width);
    Object.assign(context, { fillStyle: theme.paper, globalAlpha: 0.72 });
    context.fillRect(plot.left, 0, left - plot.left, plot.mapHeight);
    context.fillRect(right, 0, plot.left + plot.width - right, plot.mapHeight);
    Object.assign(context, { globalAlpha: 1, strokeStyle: model.isWhole() ? theme.hatch : theme.accent, lineWidth: 1.5 });
    context.strokeRect(left + 0.75, 0.75, Math.max(3, right - left - 1.5), plot.mapHeight - 1.5);
  }

  // ---- the pointer

  // A hairline at the pointer, and a frame around the span below it.
  function drawPointer() {
    const context = plotting.openCanvas(front, plot.all, plot.total);
    const { pointer, found } = state;
    if (pointer) {
      Object.assign(context, { strokeStyle: theme.ink, lineWidth: 1, globalAlpha: 0.35 });
      rule(context, Math.round(pointer.x) + 0.5, AXIS - 8, Math.round(pointer.x) + 0.5, plot.total);
    }
    if (!found) return;
    const track = tracks[found.track];
    const left = Math.max(plot.left, model.toX(track.starts[found.at]));
    const right = Math.min(plot.left + plot.width, model.toX(track.ends[found.at]));
    Object.assign(context, { strokeStyle: theme.ink, lineWidth: 1.5, globalAlpha: 1 });
    const width = Math.max(right - left, 1);
    context.strokeRect(left - 0.75, track.y - 0.75, width + 1.5, track.height + 1.5);
  }

  const forgetMap = () => (mapIsStale = true);

  return { readTheme, draw, drawPointer, forgetMap };
}
