// Lines in panels side by side. Each series has a colour and a shape; spread is a bar and not a band, which would
// claim to know what happens between two values that were measured.
charts.figure = (root, part, page) => {
  const [LEAST_PANEL, MOST_COLUMNS, FOOT, SIZE] = [300, 3, 50, 4.2];
  // Room above a plot: for the axis' name, and for the panel's where it has one.
  const HEAD = part.panels.some(Boolean) ? 46 : 28;
  // An axis labels every x that was measured up to this many; more would run into each other.
  const MOST_EXACT = 8;
  const { points } = part;
  const count = points.x.length;
  const missing = part.numLeftOut ? `${part.numLeftOut} of ${part.numLeftOut + count} points not drawn: `
    + "not finite, or not positive on a logarithmic axis." : "";
  if (!count) return plotting.sayNothing(root, `No points to draw. ${missing}`);
  const hidden = new Set();
  const back = plotting.makeCanvas("back", describe());
  const front = plotting.makeCanvas("front");
  const legend = element("ul", undefined, "legend");
  const panels = part.panels.map((name, index) => ({ name, index, frame: {}, scales: null }));
  const state = { chosen: -1, isTelling: false };
  const size = { width: 1, height: 1 };
  let theme = null;

  function describe() {
    const range = (axis, values) => `${formatOn(axis, Math.min(...values))} to ${formatOn(axis, Math.max(...values))}`;
    const names = part.series.filter(Boolean).join(", ");
    return `${part.title}: ${axes.quantity(part.y)} from ${range(part.y, points.y)} over ${axes.quantity(part.x)} from `
      + `${range(part.x, points.x)}${names ? `, for ${names}` : ""}. Arrow keys go from point to point.`;
  }

  function formatOn(axis, value) {
    if (axis.bytes) return page.formatBytes(value);
    const text = Number.isInteger(value) && Math.abs(value) < 1e9 ? page.formatNumber(value, 0) : page.formatNumber(value);
    return axis.unit ? `${text} ${axis.unit}` : text;
  }

  // As short as it is exact: 0.05 and 1,024, or bytes in their unit.
  const writeTick = (axis, value) =>
    axis.bytes ? page.formatBytes(value).replace(/\.0+(?= )/, "") : value.toLocaleString("en", { maximumSignificantDigits: 6 });

  // ---- where things are

  function fit() {
    const width = back.parentElement.clientWidth;
    const most = Math.min(MOST_COLUMNS, Math.max(1, Math.floor(width / LEAST_PANEL)));
    const rows = Math.max(1, Math.ceil(panels.length / most));
    const columns = Math.max(1, Math.ceil(panels.length / rows));
    const context = back.getContext("2d");
    context.font = plotting.FONT;
    const yTicks = makeTicks(part.y, [...points.y, ...points.low, ...points.high], 6, false);
    const gutter = Math.max(30, ...yTicks.ticks.map(({ text }) => context.measureText(text).width + 14));
    const across = width / columns;
    const height = Math.round(Math.min(280, Math.max(190, across * 0.68)));
    const xTicks = makeTicks(part.x, points.x, Math.max(3, Math.floor((across - gutter) / 80)), true);
    panels.forEach((panel, index) => {
      const frame = { left: (index % columns) * across + gutter, width: across - gutter - 14, height };
      frame.top = HEAD + Math.floor(index / columns) * (HEAD + height + FOOT);
      frame.titleLeft = (index % columns) * across;
      const x = axes.makeScale(...xTicks.domain, part.x.log, frame.left, frame.left + frame.width);
      const y = axes.makeScale(...yTicks.domain, part.y.log, frame.top + height, frame.top);
      Object.assign(panel, { frame, x, y, xTicks: xTicks.ticks, yTicks: yTicks.ticks });
    });
    Object.assign(size, { width, height: rows * (HEAD + height + FOOT) });
  }

  // A logarithmic axis labels the x that were measured, where they are few or powers of two: 128, 256, 512. Bytes are
  // counted in their unit, so that their ticks are round.
  function makeTicks(axis, values, most, isMeasured) {
    const power = axis.bytes ? Math.max(0, Math.floor(Math.log2(Math.max(1, ...values)) / 10)) : 0;
    const scaled = values.map((value) => (value === null ? null : value / 1024 ** power));
    const domain = axes.findDomain(scaled, axis.log, most);
    let ticks = axis.log ? plotting.makeLogTicks(...domain) : page.makeTicks(...domain, most).ticks;
    const measured = [...new Set(scaled)].sort((a, b) => a - b);
    const areBinary = measured.every((value) => Number.isInteger(Math.log2(value)));
    if (axis.log && isMeasured && (measured.length <= MOST_EXACT || areBinary)) {
      ticks = measured.filter((_, at) => at % Math.ceil(measured.length / MOST_EXACT) === 0);
    }
    // Zero is added because a tick may be the negative one.
    const whole = (value) => (value + 0) * 1024 ** power;
    return { domain: domain.map(whole), ticks: ticks.map(whole).map((value) => ({ value, text: writeTick(axis, value) })) };
  }

  // The points of one series in one panel, from left to right; what is switched off has none.
  function listPoints(panel, series) {
    const own = [];
    if (hidden.has(series)) return own;
    for (let at = 0; at < count; at++) if (points.panel[at] === panel && points.series[at] === series) own.push(at);
    return own.sort((a, b) => points.x[a] - points.x[b]);
  }

  // ---- drawing

  function draw() {
    theme = page.theme();
    fit();
    const context = plotting.openCanvas(back, size.width, size.height);
    for (const panel of panels) drawPanel(context, panel);
    drawChosen();
  }

  function drawPanel(context, panel) {
    const { frame, x, y, xTicks, yTicks } = panel;
    const yTitle = axes.quantity(part.y.bytes ? { label: part.y.label } : part.y);
    const xTitle = axes.quantity(part.x.bytes ? { label: part.x.label } : part.x);
    axes.draw(context, theme, frame, { scale: x, ticks: xTicks, title: xTitle }, { scale: y, ticks: yTicks, title: yTitle });
    if (panel.name) {
      Object.assign(context, { fillStyle: theme.ink, textAlign: "left", textBaseline: "bottom" });
      const name = part.panelLabel ? `${part.panelLabel}: ${panel.name}` : panel.name;
      context.font = plotting.BOLD_FONT;
      context.fillText(plotting.fitText(context, name, frame.width), frame.titleLeft, frame.top - 27);
      context.font = plotting.FONT;
    }
    part.series.forEach((name, series) => drawSeries(context, panel, series, page.colourOf(name)));
  }

  function drawSeries(context, panel, series, colour) {
    const own = listPoints(panel.index, series);
    Object.assign(context, { strokeStyle: colour, fillStyle: colour, lineWidth: 2, lineJoin: "round" });
    context.beginPath();
    for (const at of own) context.lineTo(panel.x(points.x[at]), panel.y(points.y[at]));
    context.stroke();
    context.lineWidth = 1.5;
    for (const at of own) {
      const [x, y] = [panel.x(points.x[at]), panel.y(points.y[at])];
      if (points.low[at] !== null && points.high[at] !== null) {
        plotting.rule(context, x, panel.y(points.low[at]), x, panel.y(points.high[at]));
      }
      axes.tracePath(context, axes.shapeOf(series), x, y, SIZE);
      context.fill();
    }
  }

  // ---- the point that is looked at

  function drawChosen() {
    const context = plotting.openCanvas(front, size.width, size.height);
    if (state.chosen < 0) return;
    const panel = panels[points.panel[state.chosen]];
    const [x, y] = [panel.x(points.x[state.chosen]), panel.y(points.y[state.chosen])];
    Object.assign(context, { strokeStyle: theme.ink, lineWidth: 1, globalAlpha: 0.3 });
    plotting.rule(context, x, panel.frame.top, x, panel.frame.top + panel.frame.height);
    Object.assign(context, { lineWidth: 1.5, globalAlpha: 1 });
    axes.tracePath(context, axes.shapeOf(points.series[state.chosen]), x, y, SIZE + 3);
    context.stroke();
  }

  // Everything of its panel at the same x, the one that is looked at first.
  function describePoint(chosen) {
    const same = [];
    for (let at = 0; at < count; at++) {
      const isHere = points.panel[at] === points.panel[chosen] && points.x[at] === points.x[chosen];
      if (isHere && at !== chosen && !hidden.has(points.series[at])) same.push(at);
    }
    const write = (at) => {
      const spread = points.low[at] === null || points.high[at] === null ? ""
        : ` (${formatOn(part.y, points.low[at])} to ${formatOn(part.y, points.high[at])})`;
      const name = part.series[points.series[at]];
      return `${name ? `${name}: ` : ""}${formatOn(part.y, points.y[at])}${spread}`;
    };
    const line = (at, className) => ({ text: write(at), className, colour: page.colourOf(part.series[points.series[at]]) });
    const panel = part.panels[points.panel[chosen]];
    const place = `${part.x.label} ${formatOn(part.x, points.x[chosen])}`;
    return [{ text: panel ? `${panel}, ${place}` : place, className: "of" }, line(chosen, "name"),
      ...same.map((at) => line(at, ""))];
  }

  function choose(at, x, y) {
    state.chosen = at;
    drawChosen();
    if (at >= 0) page.tip.show(x, y, describePoint(at));
    else if (state.isTelling) page.tip.hide();
    state.isTelling = at >= 0;
  }

  function findNear({ offsetX, offsetY }) {
    let [best, nearest] = [-1, 28];
    for (let at = 0; at < count; at++) {
      if (hidden.has(points.series[at])) continue;
      const panel = panels[points.panel[at]];
      const distance = Math.hypot(panel.x(points.x[at]) - offsetX, panel.y(points.y[at]) - offsetY);
      if (distance < nearest) [best, nearest] = [at, distance];
    }
    return best;
  }

  function step(by) {
    const order = panels.flatMap((panel) => part.series.flatMap((_, series) => listPoints(panel.index, series)));
    if (!order.length) return;
    const place = Math.min(Math.max(order.indexOf(state.chosen) + by, 0), order.length - 1);
    const at = order[place];
    const panel = panels[points.panel[at]];
    const box = back.getBoundingClientRect();
    choose(at, box.left + panel.x(points.x[at]), box.top + panel.y(points.y[at]));
    page.say(describePoint(at).slice(0, 2).map((line) => line.text).join(", "));
  }

  // ---- around the canvas

  function buildLegend() {
    legend.setAttribute("aria-label", part.seriesLabel || "series");
    part.series.forEach((name, series) => {
      const swatch = axes.makeSwatch(axes.shapeOf(series));
      const button = page.button(undefined, "", () => {
        if (!hidden.delete(series)) hidden.add(series);
        button.setAttribute("aria-pressed", String(!hidden.has(series)));
        draw();
      });
      button.setAttribute("aria-pressed", "true");
      button.append(swatch, element("span", name));
      const item = element("li");
      item.append(button);
      legend.append(item);
    });
    legend.hidden = part.series.join("") === "";
  }

  function redraw() {
    legend.querySelectorAll("svg").forEach((svg, series) => (svg.style.fill = page.colourOf(part.series[series])));
    draw();
  }

  const stage = element("div", undefined, "plot");
  stage.append(back, front);
  buildLegend();
  page.bodyOf(root).append(legend, stage);
  if (missing) page.bodyOf(root).append(element("p", missing, "help"));
  plotting.makeSteppable(back, { step, look: (event) => choose(event ? findNear(event) : -1, event?.clientX, event?.clientY) });
  redraw();
  root.chart = { panels, state, step, redraw };
  return root.chart;
};
