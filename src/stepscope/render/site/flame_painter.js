// Draws the flame view. Boxes that are too thin to see are drawn as one grey box, so that a step with any number of kernels
// costs the width of the canvas.
function makeFlamePainter(model, chart, { back, front }, page) {
  const [ROW, GAP, LEAST_BOX, LEAST_NAME] = [25, 1, 1.2, 22];
  // Kernels have the colours of their classes, and what is above them paler ones.
  const TINTS = { phase: 0.45, module: 0.72, op: 0.38, kernel: 0 };
  const FADED = 0.72;
  const { modules } = model;
  const widths = new Map();
  let [theme, width] = [null, 1];

  function readTheme() {
    theme = { ...page.theme(), fills: new Map() };
    theme.background = parseColour(theme.paper);
  }

  // The colour of the class with most of the time; phases have their own.
  function fillOf(one) {
    const key = one.kind === "phase" ? one.name : `${one.kind} ${one.group}`;
    if (!theme.fills.has(key)) {
      const colour = parseColour(colourOf(one.kind === "phase" ? one.name : model.classOf(one.group)));
      theme.fills.set(key, mixColours(colour, theme.background, TINTS[one.kind]));
    }
    return theme.fills.get(key);
  }

  // ---- places

  const toX = (time) => (chart.view[0] + (time / (chart.flame.root.time || 1)) * (chart.view[1] - chart.view[0])) * width;
  const topOf = (one) => (one.depth - 1) * (ROW + GAP); // the whole is a crumb above
  const heightOf = () => Math.max(1, chart.flame.levels.length - 1) * (ROW + GAP);

  function findUnder({ x, y }) {
    const level = chart.flame.levels[Math.floor(y / (ROW + GAP)) + 1];
    if (!level) return null;
    const time = (x / width) * chart.flame.root.time;
    let [low, high] = [0, level.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (level[middle].start <= time) low = middle;
      else high = middle - 1;
    }
    const one = level[low];
    return time >= one.start && time <= one.start + one.time ? one : null;
  }

  // The point of the canvas below a box.
  const findCorner = (one) => ({ x: Math.max(0, toX(one.start)) + 12, y: topOf(one) + ROW });

  // ---- boxes

  function draw() {
    width = back.parentElement.clientWidth || 1;
    const context = plotting.openCanvas(back, width, heightOf());
    for (const level of chart.flame.levels.slice(1)) drawLevel(context, level);
    drawPointer();
  }

  function drawLevel(context, level) {
    let thin = null; // from and to, of boxes next to each other
    const flush = () => {
      context.fillStyle = theme.hatch;
      if (thin && thin[1] - thin[0] >= 0.5) context.fillRect(thin[0], topOf(level[0]), thin[1] - thin[0], ROW);
      thin = null;
    };
    for (const one of level) {
      const [left, right] = [toX(one.start), toX(one.start + one.time)];
      if (right < 0 || left > width) continue;
      if (right - left < LEAST_BOX) {
        if (thin && left - thin[1] > 0.5) flush();
        thin = [thin ? thin[0] : left, right];
        continue;
      }
      flush();
      drawBox(context, one, Math.max(left, 0), Math.min(right, width));
    }
    flush();
  }

  function drawBox(context, one, left, right) {
    const [top, isFaded] = [topOf(one), chart.wanted && !chart.lit.has(one)];
    const fill = isFaded ? mixColours(fillOf(one), theme.background, FADED) : fillOf(one);
    context.fillStyle = `rgb(${fill.join(" ")})`;
    context.fillRect(left, top, right - left - (right - left > 4 ? 1 : 0), ROW);
    if (chart.matches.has(one)) {
      Object.assign(context, { strokeStyle: theme.accent, lineWidth: 1.5 });
      context.strokeRect(left + 0.75, top + 0.75, Math.max(right - left - 2.5, 1), ROW - 1.5);
    }
    const room = right - left - 11;
    const text = room < LEAST_NAME ? "" : shorten(context, one, room);
    if (!text) return;
    const [middle, time] = [top + ROW / 2 + 0.5, formatTime(one.time)];
    Object.assign(context, { fillStyle: isFaded ? theme.faint : inkOn(fill), textAlign: "left" });
    context.fillText(text, left + 6, middle);
    if (one.kind === "kernel" || measure(context, text) + measure(context, time) + 14 > room) return;
    Object.assign(context, { globalAlpha: 0.72, textAlign: "right" });
    context.fillText(time, right - 7, middle);
    context.globalAlpha = 1;
  }

  // Each name is measured once: measuring text takes longer than the rest of a frame.
  function measure(context, text) {
    if (!widths.has(text)) widths.set(text, context.measureText(text).width);
    return widths.get(text);
  }

  // A module loses the start of its path, but not the name before a number or `*`, and an operator its namespace; then
  // a module loses its number of layers, and everything its end.
  function shorten(context, one, room) {
    const whole = nameBox(modules, one);
    const [count, name] = one.copies?.size > 1 ? [whole.slice(0, -one.name.length), one.name] : ["", whole];
    const names = [name];
    if (one.kind === "module") names.push(name.match(LAST_TWO_NAMES)[0], name.match(LAST_NAME)[0]);
    if (one.kind === "op") names.push(name.replace(/^.*::/, ""));
    const texts = [...names.map((text) => `${count}${text}`), ...names];
    const fitting = texts.find((text) => measure(context, text) <= room);
    if (fitting) return fitting;
    const last = texts.at(-1);
    const kept = Math.floor((last.length * room) / measure(context, last));
    return kept >= 4 ? plotting.fitText(context, last.slice(0, kept + 4), room) : "";
  }

  // A frame around the box under the pointer, or the one that keys selected.
  function drawPointer() {
    const context = plotting.openCanvas(front, width, heightOf());
    const one = chart.pointed ?? (document.activeElement === back ? chart.focused : null);
    if (!one) return;
    const left = Math.max(0, toX(one.start));
    const right = Math.min(width, toX(one.start + one.time));
    Object.assign(context, { strokeStyle: theme.ink, lineWidth: 2 });
    context.strokeRect(left + 1, topOf(one) + 1, Math.max(right - left - 2.5, 1), ROW - 2);
  }

  return { readTheme, draw, drawPointer, findUnder, findCorner };
}

// "12 × blocks.*", or the name of the layer if one is left.
function nameBox(modules, one) {
  if (!one.copies) return one.name;
  return one.copies.size > 1 ? `${formatNumber(one.copies.size, 0)} × ${one.name}` : modules.single.labels[[...one.copies.keys()][0]];
}
