// One step's data: tracks of spans as columns, and what lies at a time. lanes.js draws it.
function layLanes(part) {
  // Further in there is nothing more to see: a kernel starts on a whole nanosecond.
  const LEAST_VIEW_NS = 50;
  const spanNs = Math.max(part.span, 1);
  // Two steps side by side have one scale, the longer one's; the shorter ends before it.
  const roomNs = Math.max(spanNs, part.longest ?? 0);
  const groups = part.groups;
  const expand = (column, length, Kind) =>
    Array.isArray(column) ? Kind.from(column) : new Kind(length).fill(column);

  // Starts and ends are sums of gaps and lengths: nanoseconds of a step are exact in a double.
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
    return own;
  }

  const tracks = part.tracks.map(unpack);

  // The first span that ends after a time: those of a track are in order and do not overlap.
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

  // The span at a time, or the nearest within `slack` of it, as a span may be thinner than a pixel; -1 where none is.
  function findAt(track, time, slack) {
    const at = findFirst(track, time);
    if (at < track.size && track.starts[at] <= time) return at;
    const after = at < track.size ? track.starts[at] - time : Infinity;
    const before = at > 0 ? time - track.ends[at - 1] : Infinity;
    if (Math.min(before, after) > slack) return -1;
    return before < after ? at - 1 : at;
  }

  // What runs: streams, or where there are none the host, or every track.
  const told = ["stream", "host"]
    .map((kind) => tracks.filter((track) => track.kind === kind))
    .find((found) => found.length) || tracks;

  // Time a group takes on the tracks that are told apart by it, the longest first.
  function sumGroups() {
    const times = new Float64Array(groups.length);
    for (const track of told) {
      for (let at = 0; at < track.size; at++) times[track.groups[at]] += track.ends[at] - track.starts[at];
    }
    return groups
      .map((name, index) => ({ index, name, time: times[index] }))
      .filter((group) => group.time > 0)
      .sort((a, b) => b.time - a.time);
  }

  // What is in view, where the plot lies in the canvas, and what the reader points at.
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

  return { part, spanNs, roomNs, tracks, told, groups, numSpans: tracks.reduce((sum, track) => sum + track.size, 0),
    legend: sumGroups(), findFirst, findAt, view, plot, state, toX, toTime, isWhole, setView };
}

// A time with all its nanoseconds: 1,234,567 ns is 1.234567 ms.
function formatExactly(page, ns) {
  const [unit, size] = ns >= 1e6 ? ["ms", 6] : ns >= 1e3 ? ["µs", 3] : ["ns", 0];
  return `${page.formatNumber(ns / 10 ** size, Number.isInteger(ns) ? size : size + 1)} ${unit}`;
}
