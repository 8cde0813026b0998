// What all charts share. Charts register in `charts` under their kind, and start.js builds each before it scrolls into
// view. Data from a recording only ever becomes text.

const charts = {};
const data = JSON.parse(document.getElementById("data").textContent);
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

// ---- elements

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function button(text, className, onClick) {
  const made = element("button", text, className);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

const bodyOf = (root) => root.querySelector(".body");

// Announces a text to screen readers.
function say(text) {
  document.getElementById("said").textContent = text;
}

// ---- numbers, formatted as in render/numbers.py

function digits(value) {
  const size = Math.abs(value);
  if (!size || size >= 1000) return 0;
  return size >= 100 ? 1 : Math.min(9, 2 - Math.floor(Math.log10(size)));
}

function roundHalfToEven(value, decimals) {
  const scaled = value * 10 ** decimals;
  const floor = Math.floor(scaled);
  return scaled - floor === 0.5 && floor % 2 === 0 ? floor / 10 ** decimals : value;
}

// By hand: the browser's formatters cost more than the rest of the first frame.
function formatNumber(value, decimals) {
  if (decimals === undefined) {
    const first = digits(value);
    decimals = digits(Number(value.toFixed(first)));
  }
  const [whole, fraction] = roundHalfToEven(value, decimals).toFixed(decimals).split(".");
  const grouped = whole.replace(/\B(?=(\d{3})+$)/g, ",");
  const text = fraction ? `${grouped}.${fraction}` : grouped;
  return text.replace(/^-(?=[0.,]*$)/, "").replace("-", "−");
}

function formatBytes(value) {
  let unit = 0;
  while (Math.abs(value) >= 999.5 && unit < UNITS.length - 1) {
    value /= 1024;
    unit++;
  }
  const size = Math.abs(value);
  const decimals = unit === 0 || size >= 99.95 ? 0 : size >= 9.995 ? 1 : size >= 0.9995 ? 2 : 3;
  return `${formatNumber(value, decimals)} ${UNITS[unit]}`;
}

function formatTime(ns) {
  const size = Math.abs(ns);
  if (!size) return "0 ms";
  if (size >= 9.995e8) return `${formatNumber(ns / 1e9)} s`;
  if (size >= 1e5) return `${formatNumber(ns / 1e6)} ms`;
  return size >= 1e3 ? `${formatNumber(ns / 1e3)} µs` : `${formatNumber(ns, 0)} ns`;
}

// A time to the nanosecond: 1,234,567 ns is 1.234567 ms.
function formatExactly(ns) {
  const [unit, size] = ns >= 1e6 ? ["ms", 6] : ns >= 1e3 ? ["µs", 3] : ["ns", 0];
  return `${formatNumber(ns / 10 ** size, Number.isInteger(ns) ? size : size + 1)} ${unit}`;
}

const formatShare = (share) => `${formatNumber(100 * share, 1)}%`;

// Not Math.max(...values), which fails with some hundred thousand values.
const largest = (items, read) => items.reduce((most, item) => Math.max(most, read(item)), 0);

function makeTicks(low, high, most) {
  const power = 10 ** Math.floor(Math.log10((high - low) / most));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate * most >= high - low);
  const ticks = [];
  for (let count = Math.ceil(low / step - 1e-9); count * step <= high + step * 1e-9; count++) ticks.push(count * step);
  return { ticks, decimals: Math.max(0, Math.min(9, -Math.floor(Math.log10(step) + 1e-9))) };
}

// ---- theme and colours

const THEMES = ["auto", "light", "dark"];
const darkness = matchMedia("(prefers-color-scheme: dark)");
const themeListeners = [];
let themeNow = null;

function theme() {
  if (themeNow) return themeNow;
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  const chosen = document.documentElement.dataset.theme;
  const name = chosen === "auto" ? (darkness.matches ? "dark" : "light") : chosen;
  themeNow = { name };
  for (const key of ["paper", "ink", "faint", "grid", "accent", "hatch"]) themeNow[key] = read(key);
  return themeNow;
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  themeChanged();
}

function themeChanged() {
  themeNow = null;
  for (const listener of themeListeners) listener();
}

const onTheme = (callback) => themeListeners.push(callback);
const colours = new Map(Object.entries(data.colours));

// A group has the same colour everywhere; groups without one are grey.
function colourOf(group) {
  return (colours.get(group) || colours.get(""))[theme().name === "dark" ? 1 : 0];
}

const parseColour = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
const mixColours = (colour, other, share) => colour.map((own, at) => Math.round(own + (other[at] - own) * share));

// Contrast as WCAG defines it, from 1 to 21.
function luminanceOf(colour) {
  const linear = colour.map((part) => (part <= 10 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

function contrastOf(colour, other) {
  const [low, high] = [luminanceOf(colour), luminanceOf(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

// The text colour with the best contrast on a fill.
const INKS = ["#14171c", "#ffffff"];
function inkOn(fill) {
  const [dark, light] = INKS.map((ink) => contrastOf(parseColour(ink), fill));
  return INKS[dark >= light ? 0 : 1];
}

// A colour with little contrast to the background gets a darker rim.
const LEAST_CONTRAST = 3;
function rimOf(colour) {
  const [own, paper, ink] = [colour, theme().paper, theme().ink].map(parseColour);
  return contrastOf(own, paper) >= LEAST_CONTRAST ? "" : `rgb(${mixColours(own, ink, 0.45).join(" ")})`;
}

function paintSwatch(swatch, colour) {
  const rim = rimOf(colour);
  Object.assign(swatch.style, { background: colour, boxShadow: rim && `inset 0 0 0 1px ${rim}` });
}

// ---- size

// Calls back after the width of `root` has changed, at most once per frame.
function onResize(root, callback) {
  let width = root.clientWidth;
  new ResizeObserver(() => {
    if (root.clientWidth === width) return;
    width = root.clientWidth;
    requestAnimationFrame(callback);
  }).observe(root);
}

// ---- the one tooltip

const tip = {
  box: document.getElementById("tip"),
  show(x, y, lines) {
    this.box.replaceChildren(...lines.map(makeLine));
    this.box.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = this.box;
    const left = x + 14 + width > innerWidth - 8 ? Math.max(8, x - 14 - width) : x + 14;
    const top = y + 16 + height > innerHeight - 8 ? Math.max(8, y - 12 - height) : y + 16;
    this.box.style.left = `${left}px`;
    this.box.style.top = `${top}px`;
  },
  hide() {
    this.box.hidden = true;
  },
};

function makeLine(line) {
  if (typeof line === "string") return element("p", line);
  const made = element("p", line.text, line.className);
  if (line.colour) {
    const dot = element("i", "", "dot");
    paintSwatch(dot, line.colour);
    made.prepend(dot);
  }
  return made;
}

// What runs on this device, as the breakdown says: kernels, or operators on a CPU.
const what = Object.values(data.exhibits ?? {}).find((part) => part.what)?.what ?? "kernels";

const page = {
  theme, colourOf, tip, bodyOf, button, say, makeTicks, what,
  formatNumber, formatBytes, formatTime, formatShare,
};
