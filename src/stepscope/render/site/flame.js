// The breakdown as a flame view. A click zooms in, which is a selection: the lists, the tree and the kernels below show the
// same part of the step, and what is selected there is what the flame view shows.
function makeFlame(model, body, select, page) {
  const { part, modules } = model;
  const what = part.what.replace(/s$/, "");
  const ZOOM_MS = 220;
  // `view` is the part of the width in which the whole is drawn: other than 0 to 1 only while zooming.
  const chart = {
    flame: null, view: [0, 1], isFolded: true, run: model.numRuns - 1, pointed: null, focused: null, isTelling: false,
    wanted: "", matches: new Set(), lit: new Set(),
  };

  // ---- elements

  const box = element("section", "", "flame");
  const tools = element("div", "", "tools");
  const crumbs = element("nav", "", "crumbs");
  const found = element("output", "", "found");
  const search = Object.assign(element("input", undefined, "search"), { type: "search", placeholder: "Highlight by name" });
  const plot = element("div", "", "plot");
  const [back, front] = ["back", "front"].map((name) => element("canvas", undefined, name));
  const fold = button("", "quiet", () => {
    chart.isFolded = !chart.isFolded;
    rebuild(false);
  });
  const runs = part.runs.length < 2 ? [] : part.runs.map((name, run) => button(name, "quiet", () => {
    chart.run = run;
    rebuild(false);
  }));
  crumbs.setAttribute("aria-label", "Zoom");
  search.setAttribute("aria-label", "Highlight in the flame view");
  front.setAttribute("aria-hidden", "true");
  back.setAttribute("role", "application");
  back.tabIndex = 0;
  fold.hidden = !modules?.folded.copies.some((count) => count > 1);
  tools.append(crumbs, found, search, ...runs, fold);
  plot.append(back, front);
  box.append(tools, plot);
  body.append(box);
  const painter = makeFlamePainter(model, chart, { back, front }, page);
  const nameOf = (one) => nameBox(modules, one);

  // ---- what a box says

  function describe(one) {
    const run = part.runs[chart.run];
    const lines = [{ text: nameOf(one), className: "name" }];
    if (one.kind === "op" || one.kind === "kernel") {
      lines.push({ text: model.classOf(one.group), colour: colourOf(model.classOf(one.group)) });
    }
    lines.push(`${run ? `${run}: ` : ""}${formatTime(one.time)}, ${shareOf(one.time)}`);
    if (one.parent.parent) lines.push(`${formatShare(one.time / one.parent.time)} of ${nameOf(one.parent)}`);
    lines.push(`${formatCount(one.count)} ${one.count === 1 ? what : part.what} ${part.unit === "step" ? "per step" : "in the trace"}`);
    if (one.copies?.size > 1) lines.push(sayCopies(one));
    for (const [line] of [...(one.sources ?? [])].sort((a, b) => b[1] - a[1]).slice(0, 3)) lines.push(part.lines[line]);
    if (one.kind === "kernel") {
      const detail = part.dimensions[one.select.at].details[one.select.value] || "";
      for (const text of detail.split("\n").filter(Boolean)) lines.push({ text, className: "of" });
    }
    return lines;
  }

  const shareOf = (time) => `${formatShare(time / (model.totals[chart.run] || 1))} of all ${what} time`;

  function sayCopies(one) {
    const sorted = [...one.copies].sort((a, b) => a[1] - b[1]);
    const [least, most] = [sorted[0], sorted.at(-1)];
    const say = ([copy, time]) => `${formatTime(time)} (${modules.single.paths[copy]})`;
    const each = `${formatTime(one.time / sorted.length)} each`;
    return formatTime(least[1]) === formatTime(most[1]) ? each : `${each}, ${say(least)} to ${say(most)}`;
  }

  // ---- zooming

  function selectionOf({ select: own, copies }) {
    if (!own.tree) return model.only(own.at, own.value);
    const [tree, node] = copies?.size === 1 ? [modules.single, [...copies.keys()][0]] : [own.tree, own.node];
    return selectNode(modules, tree, node, false);
  }

  // Selects the names of a box and of those around it, and no others but a class.
  function zoomTo(one) {
    const wanted = new Map();
    for (let here = one; here.select; here = here.parent) {
      const at = here.select.tree ? modules.at : here.select.at;
      if (!wanted.has(at)) wanted.set(at, selectionOf(here));
    }
    const others = part.dimensions.map((_, at) => at).filter((at) => at !== model.classes);
    select(others.map((at) => [at, wanted.get(at) ?? null]));
  }

  // The boxes that are zoomed in to, from the whole: selected, and alone on their level.
  function findZoomed(flame) {
    const path = [flame.root];
    for (let here = flame.root; here.children.length === 1 && isChosen(here.children[0]);) path.push((here = here.children[0]));
    return path;
  }

  function isChosen({ select: own }) {
    const chosen = model.chosen[own.tree ? modules.at : own.at];
    return Boolean(chosen && (!own.tree || isAround(modules, own, chosen)));
  }

  // Where the whole was before, in shares of the width: a box grows into the whole, or the whole shrinks into a box.
  function findMove(before, after) {
    const find = (flame, path) => path.slice(1).reduce(
      (here, { kind, name }) => here?.children.find((one) => one.kind === kind && one.name === name), flame.root);
    const grown = find(before, after.zoomed);
    if (grown && grown !== before.root) return [grown.start, grown.start + grown.time].map((time) => time / before.root.time);
    const shrunk = find(after, before.zoomed);
    if (!shrunk || shrunk === after.root) return null;
    return [-shrunk.start, after.root.time - shrunk.start].map((time) => time / shrunk.time);
  }

  function move(from) {
    chart.view = [0, 1];
    if (!from || matchMedia("(prefers-reduced-motion: reduce)").matches) return painter.draw();
    const [{ flame }, began] = [chart, performance.now()];
    const tick = () => {
      if (chart.flame !== flame) return;
      const share = Math.min(1, (performance.now() - began) / ZOOM_MS);
      const left = (1 - share) ** 3;
      chart.view = [from[0] * left, 1 + (from[1] - 1) * left];
      painter.draw();
      if (share < 1) requestAnimationFrame(tick);
    };
    tick();
  }

  // ---- around the canvas

  function fillCrumbs() {
    const { zoomed } = chart.flame;
    crumbs.replaceChildren(...zoomed.flatMap((one, index) => {
      const text = index ? nameOf(one) : `${model.chosen[model.classes]?.name ?? "all"} ${part.what}`;
      const made = button(text, "crumb", () => zoomTo(one));
      if (one === zoomed.at(-1)) made.setAttribute("aria-current", "true");
      return index ? [element("span", "›", "of"), made] : [made];
    }));
  }

  function rebuild(isMoving) {
    const before = chart.flame;
    chart.flame = growFlame(model, model.rowsLeft(-1), chart.run, chart.isFolded);
    chart.flame.zoomed = findZoomed(chart.flame);
    // Keys continue from the box that is zoomed in to.
    const { zoomed } = chart.flame;
    Object.assign(chart, { pointed: null, focused: document.activeElement === back && zoomed.length > 1 ? zoomed.at(-1) : null });
    fold.textContent = chart.isFolded ? "Unfold layers" : "Fold layers";
    runs.forEach((made, run) => made.setAttribute("aria-pressed", String(run === chart.run)));
    fillCrumbs();
    highlight();
    back.setAttribute("aria-label", sayWhole());
    move(isMoving && before ? findMove(before, chart.flame) : null);
  }

  function sayWhole() {
    const { root } = chart.flame;
    const parts = root.children.slice(0, 6).map((one) => `${nameOf(one)} ${formatTime(one.time)}`).join(", ");
    return `Flame view of ${formatTime(root.time)}: ${parts}. Arrow keys move from box to box, Enter zooms in, Backspace zooms out.`;
  }

  // Of boxes inside each other that match, the outermost counts: its time includes the others.
  function highlight() {
    chart.wanted = search.value.trim().toLowerCase();
    chart.lit.clear();
    chart.matches.clear();
    const visit = (one, isInside) => {
      const isOutermost = !isInside && nameOf(one).toLowerCase().includes(chart.wanted);
      if (isOutermost) chart.matches.add(one);
      if (isInside || isOutermost) chart.lit.add(one);
      for (const child of one.children) visit(child, isInside || isOutermost);
    };
    if (chart.wanted) visit(chart.flame.root, false);
    const time = [...chart.matches].reduce((sum, one) => sum + one.time, 0);
    found.textContent = chart.wanted ? (time ? `${formatTime(time)}, ${shareOf(time)}` : "No match") : "";
  }

  function seek() {
    highlight();
    painter.draw();
  }

  // ---- pointer and keys

  const placeOf = (event) => ({ x: event.offsetX, y: event.offsetY });

  function point(place, event) {
    chart.pointed = place && painter.findUnder(place);
    painter.drawPointer();
    if (chart.pointed) page.tip.show(event.clientX, event.clientY, describe(chart.pointed));
    else if (chart.isTelling) page.tip.hide();
    chart.isTelling = Boolean(chart.pointed);
    back.classList.toggle("over", chart.isTelling);
  }

  function focus(one) {
    if (!one) return;
    Object.assign(chart, { focused: one, pointed: null, isTelling: true });
    painter.drawPointer();
    const [place, corner, lines] = [back.getBoundingClientRect(), painter.findCorner(one), describe(one)];
    page.tip.show(place.left + corner.x, place.top + corner.y, lines);
    page.say(lines.map((line) => line.text ?? line).join(", "));
  }

  // Down goes to the longest box inside, and up to the one around.
  function walk(event) {
    const here = chart.focused ?? chart.flame.root.children[0];
    if (!here || event.ctrlKey || event.metaKey || event.altKey) return;
    const level = chart.flame.levels[here.depth];
    const moves = {
      ArrowLeft: () => level[level.indexOf(here) - 1],
      ArrowRight: () => level[level.indexOf(here) + 1],
      ArrowUp: () => here.parent.parent && here.parent,
      ArrowDown: () => here.children.reduce((most, one) => (most && most.time >= one.time ? most : one), null),
      Home: () => level[0],
      End: () => level.at(-1),
    };
    if (moves[event.key]) focus(chart.focused ? moves[event.key]() : here);
    else if (event.key === "Enter" || event.key === " ") zoomByKey(here);
    else if (event.key === "Backspace") zoomByKey(chart.flame.zoomed.at(-2) ?? chart.flame.root);
    else return;
    event.preventDefault();
  }

  // The box that was told is elsewhere, or gone.
  function zoomByKey(one) {
    zoomTo(one);
    page.tip.hide();
    chart.isTelling = false;
  }

  back.addEventListener("pointermove", (event) => point(placeOf(event), event));
  back.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && point(null, event));
  back.addEventListener("click", (event) => {
    const one = painter.findUnder(placeOf(event));
    page.tip.hide();
    if (one) zoomTo(one);
  });
  back.addEventListener("keydown", walk);
  back.addEventListener("blur", () => {
    if (chart.isTelling) page.tip.hide();
    painter.drawPointer();
  });
  search.addEventListener("input", seek);
  addEventListener("clear", () => {
    if (!search.value) return;
    search.value = "";
    seek();
  });

  painter.readTheme();
  return {
    update: () => rebuild(true),
    redraw() {
      painter.readTheme();
      painter.draw();
    },
  };
}
