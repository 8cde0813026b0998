// The page of a timeline: stacked areas on a canvas that move under the pointer, however many events they are of. This
// part has the data and what lies where; timeline_drawing.js draws it, and timeline_controls.js is what a reader does.
//
// Areas and pieces are written into pixels directly, column by column: a frame costs what the canvas has pixels, not
// what the timeline has events. As paths, a lively area makes every piece above it one of a thousand corners.
// Columns that hold several slices show the highest of them, so that no peak is lost at any zoom. Everything that came
// from outside is put in as text.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const FONT = '12px "Helvetica Neue", Helvetica, Arial, "Liberation Sans", sans-serif';
const LANE = 18;
const MOST_LANES = 3;
const MOST_ROWS = 200;
const byId = (id) => document.getElementById(id);
const back = byId("back");
const front = byId("front");
const tip = byId("tip");

// The data, unpacked: heights in steps of `grain` and as differences, pieces as columns.
const times = Float64Array.from(data.times);
const numSlices = times.length;
const accumulate = (steps) => {
  const values = new Float64Array(steps.length);
  for (let at = 0, sum = 0; at < steps.length; at++) values[at] = (sum += steps[at]) * data.grain;
  return values;
};
const unpack = ({ name, colour, steps }) => ({ name, colour, values: accumulate(steps), shown: true });
const areas = data.areas.map(unpack);
const line = data.line && unpack(data.line);
const pieces = data.pieces.area.map((area, index) => ({
  index,
  area,
  start: data.pieces.start[index],
  end: data.pieces.end[index],
  size: data.pieces.size[index] * data.grain,
  label: data.strings[data.pieces.label[index]],
  detail: data.pieces.detail[index],
}));
const stackOrder = areas.map((_, area) =>
  pieces.filter((piece) => piece.area === area).sort((a, b) => a.start - b.start || b.size - a.size));
const lanes = layLanes(data.stretches);

const first = times[0] || 0;
const end = data.end;
const totals = new Float64Array(numSlices);
const view = { start: first, end, low: 0, high: 1 };
const state = { numShown: 0, chosen: -1, pointer: null, top: 1, frame: 0 };
let plot = { left: 0, top: 0, width: 1, height: 1, ratio: 1 };
let runs = { slices: new Int32Array(0), edges: new Int32Array(1) };
let pixels = null;
let layer = null;
let names = [];
let theme = null;

// ---- words and numbers

function digits(value) {
  const size = Math.abs(value);
  if (!size || size >= 1000) return 0;
  return size >= 100 ? 1 : Math.min(9, 2 - Math.floor(Math.log10(size)));
}

// As Python rounds, so that a number reads the same here and in the tables.
function roundHalfToEven(value, decimals) {
  const scaled = value * 10 ** decimals;
  const floor = Math.floor(scaled);
  return scaled - floor === 0.5 && floor % 2 === 0 ? floor / 10 ** decimals : value;
}

// Written by hand: the browser's own formats cost more than the rest of the first frame.
function formatNumber(value, decimals = digits(value)) {
  const [whole, fraction] = roundHalfToEven(value, decimals).toFixed(decimals).split(".");
  const grouped = whole.replace(/\B(?=(\d{3})+$)/g, ",");
  return fraction ? `${grouped}.${fraction}` : grouped;
}

function formatHeight(value) {
  if (!data.bytes) return `${formatNumber(value)} ${data.yUnit}`.trim();
  let unit = 0;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1024;
    unit++;
  }
  const decimals = unit === 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : value >= 0.9995 ? 2 : 3;
  return `${formatNumber(value, decimals)} ${UNITS[unit]}`;
}

const formatTime = (value) => `${formatNumber(value)} ${data.xUnit}`.trim();
const timeOf = (slice) => (slice < numSlices ? times[slice] : end);

function makeTicks(low, high, most) {
  const power = 10 ** Math.floor(Math.log10((high - low) / most));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate * most >= high - low);
  const ticks = [];
  for (let count = Math.ceil(low / step - 1e-9); count * step <= high + step * 1e-9; count++) ticks.push(count * step);
  return { ticks, decimals: Math.max(0, Math.min(9, -Math.floor(Math.log10(step) + 1e-9))) };
}

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// ---- what is where

function layLanes(stretches) {
  const taken = [];
  return stretches
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

function sumUp() {
  totals.fill(0);
  for (const area of areas) if (area.shown) for (let at = 0; at < numSlices; at++) totals[at] += area.values[at];
  let highest = 0;
  for (let at = 0; at < numSlices; at++) highest = Math.max(highest, totals[at]);
  if (line && line.shown) for (let at = 0; at < numSlices; at++) highest = Math.max(highest, line.values[at]);
  state.top = (highest || 1) * 1.1;
  Object.assign(view, { low: 0, high: state.top });
}

function findSlice(time) {
  let low = 0;
  let high = numSlices;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= time) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 1);
}

// Columns of pixels that show one slice together, from left to right.
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
  runs = { slices: Int32Array.from(slices), edges: Int32Array.from(edges) };
}

function findRun(slice) {
  let low = 0;
  let high = runs.slices.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (runs.slices[middle] < slice) low = middle + 1;
    else high = middle;
  }
  return low;
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
