// A timeline's data and what lies where; timeline_painter.js draws it, and timeline.js is what a reader does with it.
//
// Areas and pieces are written into pixels directly, column by column: a frame costs what the canvas has pixels, not
// what the timeline has events. As paths, a lively area makes every piece above it one of a thousand corners.
// Columns that hold several slices show the highest of them, so that no peak is lost at any zoom.
function layTimeline(part, page) {
  const MOST_LANES = 3;
  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

  // The data, unpacked: heights in steps of `grain` and as differences, pieces as columns.
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
  // Where the plot lies in the canvas, and which columns of it show one slice together, from left to right.
  const plot = { left: 0, top: 0, width: 1, height: 1, ratio: 1 };
  const runs = { slices: new Int32Array(0), edges: new Int32Array(1) };

  // ---- words and numbers

  const formatHeight = (value) =>
    part.bytes ? page.formatBytes(value) : `${page.formatNumber(value)} ${part.yUnit}`.trim();
  const formatTime = (value) => `${page.formatNumber(value)} ${part.xUnit}`.trim();
  const timeOf = (slice) => (slice < numSlices ? times[slice] : end);

  // The unit of the vertical axis, and how much one of it is.
  function findUnit() {
    if (!part.bytes) return [part.yUnit, 1];
    let power = 0;
    while (view.high >= 1000 * 1024 ** power && power < UNITS.length - 1) power++;
    return [UNITS[power], 1024 ** power];
  }

  // ---- what is where

  function layLanes() {
    const taken = [];
    return part.stretches
      .map((stretch) => ({ ...stretch, lane: 0 }))
      .sort((a, b) => a.end - a.start - (b.end - b.start))
      .map((stretch) => {
        const liesApart = (other) => stretch.end <= other.start || other.end <= stretch.start;
        let lane = taken.findIndex((others) => others.every(liesApart));
        if (lane < 0) lane = taken.push([]) - 1;
        taken[lane].push(stretch);
        return Object.assign(stretch, { lane });
      })
      .filter((stretch) => stretch.lane < MOST_LANES && stretch.end > stretch.start);
  }

  // With everything shown, two timelines side by side reach as high as the higher of them.
  function sumUp() {
    totals.fill(0);
    for (const area of areas) if (area.shown) for (let at = 0; at < numSlices; at++) totals[at] += area.values[at];
    let highest = areas.every((area) => area.shown) ? part.highest || 0 : 0;
    for (let at = 0; at < numSlices; at++) highest = Math.max(highest, totals[at]);
    if (line && line.shown) for (let at = 0; at < numSlices; at++) highest = Math.max(highest, line.values[at]);
    state.top = (highest || 1) * 1.1;
    Object.assign(view, { low: 0, high: state.top });
  }

  // The first place in ascending numbers whose value is not below another.
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

  // Pieces too thin for a pixel melt into their area like those that were not asked for.
  const isToldApart = (piece, leastSize) =>
    piece.index === state.chosen || (piece.index < state.numShown && piece.size >= leastSize);
  const sizeOfPixel = () => (view.high - view.low) / (plot.height * plot.ratio);

  // What lies at a height of one slice: its area and piece, if any.
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
    part, times, numSlices, areas, line, pieces, stackOrder, lanes: layLanes(), first, end, totals, view, state, plot,
    runs, formatHeight, formatTime, timeOf, findUnit, sumUp, findRun, chooseRuns, isToldApart, sizeOfPixel, findAt,
    findPeak, setView, isInPlot, toX, toY,
  };
}
