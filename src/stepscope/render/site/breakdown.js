// The breakdown: the time of a step by class, phase, operator and module. A selection narrows the other dimensions, the
// flame view and the kernels below.
//
// A list is narrowed by the selections in the other dimensions, not by its own, so that a reader can go from one value to
// the next without clearing it. Bars are stacked by class: the colours show what a phase consists of.

const MOST_BARS = 8;

// The data of a breakdown, and the selection in each dimension: its `id`, its `name` and the values it `includes`.
function makeBreakdown(part) {
  const numRuns = part.runs.length;
  const numRows = part.places[0] ? part.places[0].length : 0;
  const classes = part.dimensions.findIndex((dimension) => dimension.key === "class");
  const totals = part.times.map((column) => column.reduce((sum, time) => sum + time, 0));
  const chosen = part.dimensions.map(() => null);
  // Kernels that overlap, on streams or devices, add up to more than the wall time: shares of the step make no sense.
  const areParallel = part.walls.some((wall, run) => totals[run] + part.idles[run] > 1.005 * wall);

  // Rows that match all selections, ignoring the one in dimension `except`.
  function rowsLeft(except) {
    const tests = chosen.map((selection, at) => [at, selection]).filter(([at, selection]) => selection && at !== except);
    const rows = [];
    for (let row = 0; row < numRows; row++) {
      if (tests.every(([at, { includes }]) => includes(part.places[at][row]))) rows.push(row);
    }
    return rows;
  }

  // Longest first; phases in the order they run.
  function orderOf(at) {
    const byTime = (a, b) => Math.max(...b.times) - Math.max(...a.times);
    return part.dimensions[at].key === "phase" ? (a, b) => a.value - b.value : (a, b) => byTime(a, b) || a.value - b.value;
  }

  // For each value of a dimension, in order: its time in each run, and that time by class.
  function sumBy(at) {
    const byValue = new Map();
    for (const row of rowsLeft(at)) {
      const value = part.places[at][row];
      let sum = byValue.get(value);
      if (!sum) byValue.set(value, (sum = { value, times: new Array(numRuns).fill(0), parts: new Map() }));
      const kind = classes < 0 ? -1 : part.places[classes][row];
      let pieces = sum.parts.get(kind);
      if (!pieces) sum.parts.set(kind, (pieces = new Array(numRuns).fill(0)));
      for (let run = 0; run < numRuns; run++) {
        sum.times[run] += part.times[run][row];
        pieces[run] += part.times[run][row];
      }
    }
    return [...byValue.values()].sort(orderOf(at));
  }

  function timeLeft() {
    const times = new Array(numRuns).fill(0);
    for (const row of rowsLeft(-1)) for (let run = 0; run < numRuns; run++) times[run] += part.times[run][row];
    return times;
  }

  const isNarrowed = () => chosen.some(Boolean);
  const only = (at, value) => ({ id: value, name: part.dimensions[at].values[value], includes: (other) => other === value });
  const classOf = (value) => (classes < 0 || value < 0 ? "" : part.dimensions[classes].values[value]);
  const modules = readModules(part);
  return { part, modules, numRuns, numRows, classes, totals, chosen, areParallel, rowsLeft, sumBy, timeLeft, isNarrowed, only, classOf };
}

// "GEMM kernels of backward in layers.3"
function describeChoice(model) {
  const { part, chosen } = model;
  const links = { phase: "of", module: "in", op: "of", kernel: "named" };
  const said = [part.what];
  part.dimensions.forEach((dimension, at) => {
    if (!chosen[at]) return;
    const { name } = chosen[at];
    if (dimension.key === "class") said.unshift(name);
    else said.push(links[dimension.key] || "of", name);
  });
  return said.join(" ");
}

charts.breakdown = (root, part, page) => {
  const model = makeBreakdown(part);
  const body = bodyOf(root);
  if (!model.numRows) {
    body.append(element("p", `No ${part.what} were recorded.`, "quiet"));
    return { redraw() {} };
  }
  const summary = element("div", "", "summary");
  const told = element("p", "", "told");
  const chips = element("div", "", "chips");
  const strips = element("div", "", "strips");
  const panels = element("div", "", "dimensions");
  const detail = element("p", "", "decoded");
  summary.append(told, chips);
  body.append(summary, strips);
  const isExpanded = part.dimensions.map(() => false);
  // A dimension with no known value has nothing to select.
  const isKnown = ({ values }) => values.length > 1 || values[0] !== "unknown";
  const offered = part.dimensions.map((dimension, at) => at).filter((at) => part.dimensions[at].key !== "kernel");
  const known = offered.filter((at) => isKnown(part.dimensions[at]));
  const unknown = offered.filter((at) => !known.includes(at)).map((at) => `${part.dimensions[at].label.toLowerCase()}s`);
  const shown = known.filter((at) => part.dimensions[at].key !== "module");
  const flame = makeFlame(model, body, select, page);
  body.append(panels);
  const lists = shown.map((at) => makePanel(at));
  const tree = known.includes(model.modules?.at) ? makeModuleTree(model, body, select) : null;
  if (unknown.length) body.append(element("p", `Not in this recording: ${unknown.join(", ")}.`, "help unknown"));
  body.append(detail);
  const table = makeKernelTable(model, body, choose, clear);

  // Changes the selections of some dimensions; null clears one.
  function select(changes) {
    for (const [at, selection] of changes) model.chosen[at] = selection;
    update();
    page.say(told.textContent);
  }

  function choose(at, value) {
    select([[at, model.chosen[at]?.id === value ? null : model.only(at, value)]]);
  }

  function clear() {
    if (model.isNarrowed()) select(part.dimensions.map((_, at) => [at, null]));
  }

  function makePanel(at) {
    const panel = element("section", "", "dimension");
    const list = element("ul");
    list.addEventListener("keydown", walk);
    panel.append(element("h4", part.dimensions[at].label), list);
    panel.dataset.dimension = part.dimensions[at].key;
    panels.append(panel);
    return list;
  }

  // Up and down move within a list, left and right between lists.
  function walk(event) {
    const steps = { ArrowUp: -1, ArrowDown: 1, Home: -Infinity, End: Infinity };
    const here = event.target.closest("button");
    const items = [...event.currentTarget.querySelectorAll("button")];
    if (event.key in steps) moveAmong(items, here, steps[event.key]);
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const list = lists[lists.indexOf(event.currentTarget) + (event.key === "ArrowLeft" ? -1 : 1)];
      if (!list) return;
      const others = [...list.querySelectorAll("button")];
      others[Math.min(items.indexOf(here), others.length - 1)]?.focus();
    } else return;
    event.preventDefault();
  }

  function fillPanel(at, list) {
    const sums = model.sumBy(at);
    const most = largest(sums, (sum) => Math.max(...sum.times)) || 1;
    const focused = list.contains(document.activeElement) ? document.activeElement.dataset.value : null;
    const visible = isExpanded[at] || sums.length <= MOST_BARS + 1 ? sums : sums.slice(0, MOST_BARS);
    const isHidden = model.chosen[at] && !visible.some((sum) => sum.value === model.chosen[at].id);
    const rows = isHidden ? [...visible, ...sums.filter((sum) => sum.value === model.chosen[at].id)] : visible;
    list.replaceChildren(...rows.map((sum) => makeBar(model, at, sum, most, choose)));
    if (visible.length < sums.length || isExpanded[at]) {
      const text = isExpanded[at] ? "Show fewer" : `Show all ${formatNumber(sums.length, 0)}`;
      const item = element("li");
      item.append(button(text, "quiet", () => {
        isExpanded[at] = !isExpanded[at];
        fillPanel(at, list);
        list.querySelector("li:last-child button").focus();
      }));
      list.append(item);
    }
    const buttons = [...list.querySelectorAll("button")];
    const entry = buttons.find((item) => item.getAttribute("aria-pressed") === "true") || buttons[0];
    for (const item of buttons) item.tabIndex = item === entry ? 0 : -1;
    if (focused !== null) buttons.find((item) => item.dataset.value === focused)?.focus();
  }

  function fillChips() {
    const made = part.dimensions.flatMap((dimension, at) => {
      if (!model.chosen[at]) return [];
      const { name } = model.chosen[at];
      const chip = button("", "chip", () => select([[at, null]]));
      chip.append(element("span", `${dimension.label.toLowerCase()} `, "of"), element("span", name, "name"),
        element("span", "×", "cross"));
      chip.setAttribute("aria-label", `Clear ${dimension.label.toLowerCase()} ${name}`);
      return [chip];
    });
    if (made.length) made.push(button("Clear all", "quiet", clear));
    chips.replaceChildren(...made);
  }

  function fillStrips() {
    strips.replaceChildren(...part.runs.map((name, run) => makeStrip(model, run, body.clientWidth, choose)));
  }

  function update() {
    const choice = model.isNarrowed() ? describeChoice(model) : `all ${part.what}`;
    const link = model.areParallel ? `in a ${part.unit} of` : "of";
    const devices = part.numDevices > 1 ? ` on ${part.numDevices} GPUs` : "";
    const figures = model.timeLeft().flatMap((time, run) => {
      const name = part.runs[run] ? `${part.runs[run]} ` : "";
      return [run ? ", " : "", element("strong", `${name}${formatTime(time)}`), ` ${link} ${formatTime(part.walls[run])}`];
    });
    const subject = `${choice}${devices}${model.numRuns > 1 ? ":" : " take"} `;
    told.replaceChildren(...(model.areParallel ? [subject, ...figures] : [...figures, `: ${choice}`]));
    fillChips();
    fillStrips();
    shown.forEach((at, index) => fillPanel(at, lists[index]));
    flame.update();
    tree?.update();
    const kernels = part.dimensions.findIndex((dimension) => dimension.key === "kernel");
    const kernel = kernels < 0 ? null : model.chosen[kernels];
    detail.textContent = kernel ? part.dimensions[kernels].details[kernel.id] || "" : "";
    detail.hidden = !detail.textContent;
    table.update();
  }

  // For other charts: narrows to a value by its name; returns whether there is one.
  function narrow(key, name) {
    const at = part.dimensions.findIndex((dimension) => dimension.key === key);
    const value = at < 0 ? -1 : part.dimensions[at].values.indexOf(name);
    if (value >= 0 && model.chosen[at]?.id !== value) choose(at, value);
    return value >= 0;
  }

  addEventListener("clear", clear);
  update();
  let colours = page.theme().name;
  return { narrow, redraw() {
    flame.redraw();
    if (colours === page.theme().name) fillStrips();
    else update();
    colours = page.theme().name;
  } };
};

// The bar of a value, or one bar per run, in the colours of its classes.
function makeBar(model, at, sum, most, choose) {
  const { part, chosen } = model;
  const name = part.dimensions[at].values[sum.value];
  const made = button("", "choice", () => choose(at, sum.value));
  made.dataset.value = sum.value;
  made.setAttribute("aria-pressed", String(chosen[at]?.id === sum.value));
  if (chosen[at] && chosen[at].id !== sum.value) made.classList.add("apart");
  const label = element("span", name, "name");
  label.title = name;
  if (part.dimensions[at].key === "class") {
    const dot = element("i", "", "dot");
    paintSwatch(dot, colourOf(name));
    label.prepend(dot);
  }
  const figures = element("span", "", "value");
  if (model.numRuns === 1) {
    figures.append(formatTime(sum.times[0]), element("span", formatShare(sum.times[0] / (model.totals[0] || 1)), "of"));
  } else figures.append(sum.times.map(formatTime).join(" → "));
  made.append(label, figures);
  sum.times.forEach((time, run) => {
    const track = element("span", "", "track");
    const kinds = [...sum.parts].sort((a, b) => b[1][run] - a[1][run]);
    for (const [kind, times] of kinds) {
      if (!times[run]) continue;
      const piece = element("i");
      piece.style.width = `${(100 * times[run]) / most}%`;
      paintSwatch(piece, colourOf(model.classOf(kind)));
      track.append(piece);
    }
    if (model.numRuns > 1) track.dataset.run = part.runs[run];
    made.append(track);
  });
  const item = element("li");
  item.append(made);
  return item;
}

// The wall time of a step as one bar: selected kernels by class, other kernels, and idle time.
function makeStrip(model, run, width, choose) {
  const { part } = model;
  const strip = element("div", "", "strip-row");
  const bar = element("div", "", "wall");
  const scale = Math.max(...part.walls.map((wall, at) => Math.max(wall, model.totals[at] + part.idles[at])), 1);
  const fits = (text, time) => (width * time) / scale > 7.2 * text.length + 22;
  const add = (time, name, className, onClick) => {
    if (time <= 0) return;
    const piece = element("i", "", className);
    piece.style.width = `${(100 * time) / scale}%`;
    if (!className) paintSwatch(piece, colourOf(name));
    const label = [`${name || "other"} ${formatTime(time)}`, name].find((text) => text && fits(text, time));
    if (label) piece.append(element("span", label));
    if (!className) piece.style.color = inkOn(parseColour(colourOf(name)));
    const share = model.areParallel ? "" : `, ${formatShare(time / (part.walls[run] || 1))} of the ${part.unit}`;
    const lines = [{ text: name || "Not selected", className: "name" }, `${formatTime(time)}${share}`];
    piece.addEventListener("pointermove", (event) => tip.show(event.clientX, event.clientY, lines));
    piece.addEventListener("pointerleave", () => tip.hide());
    if (onClick) piece.addEventListener("click", onClick);
    bar.append(piece);
  };
  const left = new Map();
  for (const row of model.rowsLeft(-1)) {
    const kind = model.classes < 0 ? -1 : part.places[model.classes][row];
    left.set(kind, (left.get(kind) || 0) + part.times[run][row]);
  }
  let sum = 0;
  for (const [kind, time] of [...left].sort((a, b) => b[1] - a[1])) {
    add(time, model.classOf(kind) || part.what, "", () => model.classes >= 0 && choose(model.classes, kind));
    sum += time;
  }
  add(model.totals[run] - sum, "", "rest");
  add(part.idles[run], part.what === "operators" ? "outside operators" : "idle", "idle");
  bar.setAttribute("aria-hidden", "true");
  if (model.numRuns > 1) strip.append(element("span", part.runs[run], "run"));
  strip.append(bar);
  return strip;
}
