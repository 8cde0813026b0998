// What operators reach of what the device allows: operations a second over operations a byte, both logarithmic. The
// slope is memory's limit, the flat lines are arithmetic's. A point is as large as the time it takes.
charts.roofline = (root, part, page) => {
  const [LEAST_SIZE, MOST_SIZE, MOST_NAMES, MOST_READ] = [3.5, 17, 9, 60];
  const PREFIXES = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const { points, roofs, bandwidth } = part;
  if (!points.length) return plotting.sayNothing(root, "No points to draw.");
  const isPair = part.runs.length > 1;
  const frame = { left: 48, top: 34, width: 1, height: 1, titleLeft: 0 };
  const size = { width: 1, height: 1 };
  const state = { chosen: -1, only: "", isTelling: false, names: [] };
  const scales = { x: null, y: null, domain: null };
  const back = plotting.makeCanvas("back", describe());
  const front = plotting.makeCanvas("front");
  const legend = element("ul", undefined, "legend");
  const groups = [...new Set(points.map((point) => point.group))];
  const highest = Math.max(0, ...roofs.map((roof) => roof.flops));
  let theme = null;

  // ---- words

  function formatRate(value, unit) {
    const [factor, prefix] = PREFIXES.find(([least]) => value >= least * 0.9995) || [1, ""];
    return `${page.formatNumber(value / factor)} ${prefix}${unit}`;
  }

  function describe() {
    const top = points.slice(0, 3).map((point) => `${point.label} at ${formatRate(point.y, "FLOP/s")}`);
    return `${part.title}: ${points.length} operators under ${roofs.length} limits of arithmetic and one of memory of `
      + `${formatRate(bandwidth, "B/s")}. Most time: ${top.join("; ")}. Arrow keys go from point to point.`;
  }

  function describePoint(point) {
    const lines = [{ text: point.label, className: "name" }];
    lines.push({ text: isPair ? `${point.group}, run ${part.runs[point.run]}` : point.group, colour: page.colourOf(point.group) });
    lines.push(`${page.formatQuantity("ms", point.ms)} a step, ${page.formatShare(point.share)} of all ${page.what}`);
    lines.push(`${formatRate(point.y, "FLOP/s")} at ${page.formatNumber(point.x)} FLOP a byte`);
    if (point.reached !== null) lines.push(`${page.formatShare(point.reached)} of what the device allows`);
    lines.push(`bound by ${point.bound}`);
    for (const text of point.detail ? point.detail.split("\n") : []) lines.push({ text, className: "of" });
    return lines;
  }

  // ---- where things are

  function fit() {
    const width = back.parentElement.clientWidth;
    const height = Math.round(Math.min(480, Math.max(320, width * 0.5)));
    Object.assign(size, { width, height });
    Object.assign(frame, { width: width - frame.left - 12, height: height - frame.top - 48 });
    const bends = roofs.map((roof) => roof.flops / bandwidth);
    const xs = [...points.map((point) => point.x), ...bends];
    const ys = [...points.map((point) => point.y), ...roofs.map((roof) => roof.flops)];
    const low = { x: Math.min(...xs) / 2.2, y: Math.min(...ys) / 2.2 };
    const high = { x: Math.max(...xs) * 4, y: Math.max(...ys) * 1.9 };
    scales.domain = { low, high };
    scales.x = axes.makeScale(low.x, high.x, true, frame.left, frame.left + frame.width);
    scales.y = axes.makeScale(low.y, high.y, true, frame.top + frame.height, frame.top);
  }

  // An area as large as the time: the eye compares areas.
  function sizeOf(point) {
    const most = points[0].ms || 1;
    const scale = Math.min(1, Math.max(0.7, size.width / 900));
    return Math.max(LEAST_SIZE, MOST_SIZE * scale * Math.sqrt(point.ms / most));
  }

  const placeOf = (point) => ({ x: scales.x(point.x), y: scales.y(point.y), size: sizeOf(point) });
  const isQuiet = (point) => state.only !== "" && point.group !== state.only;
  // Of two runs the first is hollow: it is the one before.
  const isHollow = (point) => isPair && point.run === 0;

  // ---- drawing

  function draw() {
    theme = page.theme();
    fit();
    const context = plotting.openCanvas(back, size.width, size.height);
    drawAxes(context);
    const taken = drawRoofs(context);
    if (isPair) drawMoves(context);
    // The smallest last, so that none lies hidden under a larger one.
    for (const point of points) drawPoint(context, point);
    drawNames(context, taken);
    drawChosen();
  }

  function drawAxes(context) {
    const { low, high } = scales.domain;
    const write = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });
    const xTicks = plotting.makeLogTicks(low.x, high.x).map((value) => ({ value, text: write(value) }));
    const yTicks = plotting.makeLogTicks(low.y, high.y)
      .map((value) => ({ value, text: formatRate(value, "").replace(/\.0+(?= )/, "") }));
    axes.draw(context, theme, frame,
      { scale: scales.x, ticks: xTicks, title: "operations a byte (FLOP/B)" },
      { scale: scales.y, ticks: yTicks, title: "operations a second (FLOP/s)" });
  }

  // The limits with their names; gives back where the names stand.
  function drawRoofs(context) {
    const { low } = scales.domain;
    const right = frame.left + frame.width;
    const taken = [];
    Object.assign(context, { strokeStyle: theme.faint, fillStyle: theme.faint, lineWidth: 1.6, font: plotting.FONT });
    const bend = highest / bandwidth;
    const [x1, y1] = [scales.x(low.x), scales.y(low.x * bandwidth)];
    const [x2, y2] = [scales.x(bend), scales.y(highest)];
    context.save();
    context.beginPath();
    context.rect(frame.left, frame.top, frame.width, frame.height);
    context.clip();
    plotting.rule(context, x1, y1, x2, y2);
    for (const roof of roofs) {
      const y = scales.y(roof.flops);
      plotting.rule(context, scales.x(roof.flops / bandwidth), y, right, y);
    }
    context.restore();
    Object.assign(context, { textAlign: "right", textBaseline: "bottom" });
    const sorted = [...roofs].sort((a, b) => b.flops - a.flops);
    let above = -Infinity;
    for (const roof of sorted) {
      const y = scales.y(roof.flops);
      const text = plotting.fitText(context, `${roof.label}, ${formatRate(roof.flops, "FLOP/s")}`, frame.width - 8);
      // Under its line where the one above is too near.
      const isUnder = y - above < 17;
      const baseline = isUnder ? y + 17 : y - 3;
      above = isUnder ? y + 17 : y;
      writeOver(context, text, right - 4, baseline);
      taken.push({ left: right - 8 - context.measureText(text).width, right, top: baseline - 14, bottom: baseline });
    }
    writeAlongSlope(context, { x1, y1, x2, y2 });
    return taken;
  }

  // With a rim in the colour of the paper, so that lines do not cross letters.
  function writeOver(context, text, x, y) {
    Object.assign(context, { lineWidth: 4, lineJoin: "round" });
    context.save();
    context.strokeStyle = theme.paper;
    context.strokeText(text, x, y);
    context.restore();
    context.fillText(text, x, y);
  }

  function writeAlongSlope(context, { x1, y1, x2, y2 }) {
    // From where the slope enters the plot, a little way up.
    const bottom = frame.top + frame.height;
    const enter = y1 > bottom ? x1 + ((y1 - bottom) / (y1 - y2)) * (x2 - x1) : x1;
    const share = Math.min(1, (enter - x1) / (x2 - x1 || 1) + 0.3);
    context.save();
    context.translate(x1 + (x2 - x1) * share, y1 + (y2 - y1) * share);
    context.rotate(Math.atan2(y2 - y1, x2 - x1));
    Object.assign(context, { textAlign: "left", textBaseline: "bottom" });
    writeOver(context, `memory, ${formatRate(bandwidth, "B/s")}`, 0, -4);
    context.restore();
  }

  // From an operator in one run to the same in the other.
  function drawMoves(context) {
    const first = new Map();
    // One that is there twice has no way of its own.
    for (const point of points.filter((point) => point.run === 0)) {
      first.set(point.label, first.has(point.label) ? null : point);
    }
    Object.assign(context, { strokeStyle: theme.faint, lineWidth: 1, globalAlpha: 0.5 });
    for (const point of points) {
      const before = point.run > 0 && first.get(point.label);
      if (before) plotting.rule(context, scales.x(before.x), scales.y(before.y), scales.x(point.x), scales.y(point.y));
    }
    context.globalAlpha = 1;
  }

  function drawPoint(context, point) {
    const { x, y, size: radius } = placeOf(point);
    const colour = page.colourOf(point.group);
    context.globalAlpha = isQuiet(point) ? 0.12 : 1;
    axes.tracePath(context, "circle", x, y, isHollow(point) ? radius - 1 : radius);
    if (isHollow(point)) {
      Object.assign(context, { strokeStyle: colour, lineWidth: 2 });
      context.stroke();
    } else {
      Object.assign(context, { fillStyle: colour, strokeStyle: rimOf(colour) || theme.paper, lineWidth: 1 });
      context.globalAlpha *= 0.86;
      context.fill();
      context.stroke();
    }
    context.globalAlpha = 1;
  }

  // Whether a limit's line goes through a box.
  function isCrossed(box) {
    const { low } = scales.domain;
    const [left, bend] = [scales.x(low.x), scales.x(highest / bandwidth)];
    const slope = (scales.y(highest) - scales.y(low.x * bandwidth)) / (bend - left);
    const heights = [box.left, box.right].map((x) => scales.y(low.x * bandwidth) + (x - left) * slope);
    const isOnSlope = box.left < bend && Math.min(...heights) < box.bottom && Math.max(...heights) > box.top;
    return isOnSlope || roofs.some((roof) => {
      const y = scales.y(roof.flops);
      return y > box.top && y < box.bottom && box.right > scales.x(roof.flops / bandwidth);
    });
  }

  // Names of the largest, each beside its point where nothing else stands; who finds no room has none.
  function drawNames(context, taken) {
    Object.assign(context, { font: plotting.FONT, fillStyle: theme.ink, textAlign: "left", textBaseline: "middle" });
    const discs = points.slice(0, 40).map((point) => ({ point, ...placeOf(point) }));
    const boxes = [...taken];
    const clashes = (box, own) =>
      box.left < frame.left || box.right > frame.left + frame.width || box.top < frame.top
      || box.bottom > frame.top + frame.height
      || boxes.some((other) => box.left < other.right && other.left < box.right && box.top < other.bottom && other.top < box.bottom)
      || discs.some(({ point, x, y, size: radius }) => {
        const [across, down] = [Math.max(box.left - x, 0, x - box.right), Math.max(box.top - y, 0, y - box.bottom)];
        return point !== own && Math.hypot(across, down) < radius;
      });
    const named = new Set();
    state.names = boxes;
    for (const { point, x, y, size: radius } of discs) {
      if (named.size >= MOST_NAMES) break;
      if (isQuiet(point) || named.has(point.label)) continue;
      const text = plotting.fitText(context, point.label, 240);
      const width = context.measureText(text).width;
      const away = radius + 5;
      const spots = [[x + away, y], [x - away - width, y], [x - width / 2, y - away - 7], [x - width / 2, y + away + 7],
        [x + away * 0.7, y - away * 0.7 - 5], [x + away * 0.7, y + away * 0.7 + 5]];
      const spot = spots.map(([left, middle]) => ({ left: left - 2, right: left + width + 2, top: middle - 8, bottom: middle + 8 }))
        .filter((box) => !clashes(box, point))
        .sort((a, b) => isCrossed(a) - isCrossed(b))[0];
      if (!spot) continue;
      boxes.push(spot);
      named.add(point.label);
      writeOver(context, text, spot.left + 2, (spot.top + spot.bottom) / 2);
    }
  }

  // ---- the point that is looked at

  function drawChosen() {
    const context = plotting.openCanvas(front, size.width, size.height);
    if (state.chosen < 0) return;
    const { x, y, size: radius } = placeOf(points[state.chosen]);
    Object.assign(context, { strokeStyle: theme.ink, lineWidth: 2 });
    axes.tracePath(context, "circle", x, y, radius + 3);
    context.stroke();
  }

  function choose(at, x, y) {
    state.chosen = at;
    drawChosen();
    if (at >= 0) page.tip.show(x, y, describePoint(points[at]));
    else if (state.isTelling) page.tip.hide();
    state.isTelling = at >= 0;
  }

  // The nearest by its edge, the smaller first where several lie over one another.
  function findNear({ offsetX, offsetY }) {
    let [best, nearest] = [-1, 6];
    points.forEach((point, at) => {
      const place = placeOf(point);
      const distance = Math.hypot(place.x - offsetX, place.y - offsetY) - place.size;
      if (!isQuiet(point) && (distance <= nearest || distance < 0)) [best, nearest] = [at, Math.max(distance, 0)];
    });
    return best;
  }

  // In the order of their time, the longest first.
  function step(by) {
    const at = Math.min(Math.max(state.chosen + by, 0), points.length - 1);
    const place = placeOf(points[at]);
    const box = back.getBoundingClientRect();
    choose(at, box.left + place.x, box.top + place.y);
    page.say(describePoint(points[at]).map((line) => line.text ?? line).join(", "));
  }

  // ---- around the canvas

  function buildLegend() {
    legend.setAttribute("aria-label", "classes");
    for (const group of groups) {
      const button = page.button(undefined, "", () => {
        state.only = state.only === group ? "" : group;
        for (const other of legend.querySelectorAll("button")) other.setAttribute("aria-pressed", "false");
        button.setAttribute("aria-pressed", String(state.only !== ""));
        draw();
      });
      button.setAttribute("aria-pressed", "false");
      button.append(element("i"), element("span", group || "other"));
      const item = element("li");
      item.append(button);
      legend.append(item);
    }
    for (const [run, className] of isPair ? [[0, "ring"], [1, "disc"]] : []) {
      const item = element("li", undefined, "run");
      item.append(element("i", undefined, className), element("span", `run ${part.runs[run]}`));
      legend.append(item);
    }
  }

  function buildList() {
    const list = element("ol", undefined, "unseen");
    for (const point of points.slice(0, MOST_READ)) {
      list.append(element("li", describePoint(point).map((line) => line.text ?? line).join(", ")));
    }
    return list;
  }

  function redraw() {
    legend.querySelectorAll("button i").forEach((swatch, at) => paintSwatch(swatch, page.colourOf(groups[at])));
    draw();
  }

  const stage = element("div", undefined, "plot");
  stage.append(back, front);
  buildLegend();
  const help = "Under the slope memory is the limit, under a flat line arithmetic; how far a point lies below its line is "
    + "what could be gained. A point's area is its time in a step.";
  page.bodyOf(root).append(legend, stage, element("p", help, "help"), buildList());
  plotting.makeSteppable(back, { step, look: (event) => choose(event ? findNear(event) : -1, event?.clientX, event?.clientY) });
  redraw();
  root.chart = { points, state, scales, placeOf, step, redraw };
  return root.chart;
};
