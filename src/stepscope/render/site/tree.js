// The tree of modules in the breakdown: time, share, kernels and phases of each, with alike layers folded and what tells
// them apart. A row narrows everything else to its module.

const MOST_OPENED = 24; // rows, until the reader opens more
const MOST_SINGLES = 128; // bars in one drawing

function makeModuleTree(model, body, select) {
  const { part, modules, numRuns } = model;
  const { folded, single } = modules;
  const isPair = numRuns > 1;
  const box = element("section", "", "modules");
  const scroll = element("div", "", "scroll");
  const table = element("table");
  table.setAttribute("role", "treegrid");
  table.setAttribute("aria-label", "Modules");
  const rows = element("tbody");
  const open = new Set();
  let [foldedSums, singleSums, phases, most, shown] = [null, null, [], 1, []];
  let isOpened = false;
  const title = element("h4", "Module ");
  title.append(element("span", `ms ${part.unit === "step" ? "per step" : "in the trace"}, alike layers folded`, "of"));
  box.append(title, scroll);
  scroll.append(table);
  body.append(box);

  // ---- rows

  // A row is a node of one of the trees, or what it runs itself. `isApart`: a single module among its copies.
  const keyOf = ({ tree, node, isSelf }) => `${tree === folded ? "f" : "s"}${node}${isSelf ? "self" : ""}`;
  const sumsOf = (tree) => (tree === folded ? foldedSums : singleSums);
  const indexOf = ({ tree, node, isSelf }) => (isSelf ? tree.size + node : node);
  const timeOf = (row) => sumsOf(row.tree).timeOf(indexOf(row));

  function childrenOf(row) {
    const { tree, node, depth } = row;
    const inside = tree.children[node].map((child) => ({ tree, node: child, depth: depth + 1 }));
    const found = [...inside, { tree, node, isSelf: true, depth: depth + 1 }].filter((child) => timeOf(child) > 0);
    if (found.length === 1 && found[0].isSelf) return [];
    return found.sort((a, b) => timeOf(b) - timeOf(a) || a.node - b.node);
  }

  function copiesOf({ tree, node, isSelf, depth }) {
    if (isSelf || tree !== folded || folded.copies[node] < 2) return [];
    return modules.members[node].map((one) => ({ tree: single, node: one, depth: depth + 1, isApart: true }))
      .filter((row) => timeOf(row) > 0)
      .sort((a, b) => wordOrder.compare(single.paths[a.node], single.paths[b.node]));
  }

  function listRows() {
    const listed = [];
    const add = (row) => {
      listed.push(row);
      const key = keyOf(row);
      if (open.has(`${key}*`)) copiesOf(row).forEach(add);
      else if (open.has(key)) childrenOf(row).forEach(add);
    };
    topRows().forEach(add);
    return listed;
  }

  const topRows = () => folded.tops.map((node) => ({ tree: folded, node, depth: 0 }))
    .filter((row) => timeOf(row) > 0).sort((a, b) => timeOf(b) - timeOf(a));

  // Opens the longest modules until there is something to see.
  function openSome() {
    const waiting = topRows();
    let count = waiting.length;
    while (waiting.length) {
      waiting.sort((a, b) => timeOf(b) - timeOf(a));
      const row = waiting.shift();
      const inside = row.isSelf ? [] : childrenOf(row);
      if (!inside.length) continue;
      if (count + inside.length > MOST_OPENED && count > 1) return;
      open.add(keyOf(row));
      count += inside.length;
      waiting.push(...inside);
    }
  }

  // ---- cells

  function columnsOf() {
    const ms = (label, read, className) => ({ label, className, text: (row) => (read(row) ? inMs(read(row)) : "–") });
    if (isPair) {
      const time = (run) => (row) => sumsOf(row.tree).times[run][indexOf(row)];
      return [
        ...part.runs.map((name, run) => ms(name, time(run))),
        { label: "change", text: (row) => signed(inMs(time(1)(row) - time(0)(row))) },
      ];
    }
    const read = (name) => (row) => sumsOf(row.tree)[name][0][indexOf(row)];
    const inPhase = (phase) => (row) => sumsOf(row.tree).phaseOf(0, indexOf(row), phase);
    const phasesOf = phases.map((phase) => ms(part.dimensions[phaseAt].values[phase], inPhase(phase), "phase"));
    return [
      ms("ms", read("times")),
      { label: "share", text: (row) => formatShare(read("times")(row) / (model.totals[0] || 1)) },
      { label: part.what, text: (row) => formatCount(read("counts")(row)), className: "spread" },
      ...phasesOf,
      { label: "each", text: (row) => withSpread(row, (spread) => inMs(timeOf(row) / spread.items.length)), className: "spread" },
      { label: "min – max", text: rangeOf, className: "spread range" },
    ];
  }

  const phaseAt = part.dimensions.findIndex((dimension) => dimension.key === "phase");
  const spreadOf = (row) => (row.tree !== folded ? null : findSpread((one) => singleSums.timeOf(one + (row.isSelf ? single.size : 0)),
    modules.members[row.node].filter((one) => singleSums.timeOf(one + (row.isSelf ? single.size : 0)) > 0)));
  // Without all copies, none of their figures: part of the time was merged over them.
  const withSpread = (row, text) => {
    row.spread ??= spreadOf(row);
    const { spread } = row;
    if (!spread) return "";
    const sum = spread.items.reduce((all, one) => all + timeOfCopy(row, one), 0);
    return sum < 0.999 * timeOf(row) ? "" : text(spread);
  };
  const timeOfCopy = (row, one) => singleSums.timeOf(one + (row.isSelf ? single.size : 0));

  function rangeOf(row) {
    return withSpread(row, (spread) => [spread.shortest, spread.longest].map((one) => inMs(timeOfCopy(row, one))).join(" – "));
  }

  // One bar per copy, in model order: an odd layer stands out.
  function drawCopies(row) {
    const { items, median } = row.spread;
    const highest = timeOfCopy(row, row.spread.longest) || 1;
    const step = Math.max(2, Math.min(6, Math.floor(96 / items.length)));
    const bars = { usual: "", odd: "" };
    items.slice(0, MOST_SINGLES).forEach((one, at) => {
      const height = Math.max(1, Math.round((14 * timeOfCopy(row, one)) / highest));
      bars[isOdd(timeOfCopy(row, one), median) ? "odd" : "usual"] += `M${at * step} ${15 - height}h${step - 1}v${height}h${1 - step}z`;
    });
    const [svg, ...paths] = ["svg", "path", "path"].map((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));
    const width = Math.min(items.length, MOST_SINGLES) * step;
    for (const [name, value] of Object.entries({ class: "copies", width, height: 15, viewBox: `0 0 ${width} 15`, "aria-hidden": true })) {
      svg.setAttribute(name, value);
    }
    ["usual", "odd"].forEach((name, at) => {
      paths[at].setAttribute("class", name);
      paths[at].setAttribute("d", bars[name]);
    });
    svg.append(...paths);
    return svg;
  }

  function makeName(row) {
    const { tree, node, isSelf, depth, isApart } = row;
    const cell = element("td", "", "name");
    const key = keyOf(row);
    const line = element("div");
    line.style.paddingLeft = `${16 * Math.min(depth, 12)}px`;
    const [inside, copies] = [isSelf ? [] : childrenOf(row), copiesOf(row)];
    const isOpen = open.has(key) || open.has(`${key}*`);
    const twist = element("i", inside.length || copies.length ? (isOpen ? "▾" : "▸") : "", "twist");
    line.append(twist);
    if (copies.length) {
      const chip = button(`${formatNumber(copies.length, 0)} ×`, "copies-chip", (event) => {
        event.stopPropagation();
        toggleCopies(row);
      });
      chip.tabIndex = -1;
      chip.title = open.has(`${key}*`) ? "Fold them again" : "Show them one by one";
      chip.setAttribute("aria-pressed", String(open.has(`${key}*`)));
      line.append(chip);
    }
    const label = element("span", isSelf ? SELF : isApart ? tree.paths[node] : tree.labels[node], isSelf ? "label quiet" : "label");
    label.title = tree.paths[node];
    line.append(label);
    cell.append(line);
    return cell;
  }

  function makeBars(row) {
    const cell = element("td", "", "bars");
    for (let run = 0; run < numRuns; run++) {
      const track = element("span", "", "track");
      for (const [kind, time] of sumsOf(row.tree).classesOf(run, indexOf(row))) {
        const piece = element("i");
        piece.style.width = `${(100 * time) / most}%`;
        paintSwatch(piece, colourOf(model.classOf(kind)));
        track.append(piece);
      }
      cell.append(track);
    }
    return cell;
  }

  function makeRow(row, columns) {
    const made = element("tr");
    const key = keyOf(row);
    made.dataset.key = key;
    made.tabIndex = -1;
    made.setAttribute("aria-level", String(row.depth + 1));
    made.setAttribute("aria-selected", String(model.chosen[modules.at]?.id === key));
    if (!row.isSelf && (childrenOf(row).length || copiesOf(row).length)) {
      made.setAttribute("aria-expanded", String(open.has(key) || open.has(`${key}*`)));
    }
    made.append(makeName(row), makeBars(row));
    for (const column of columns) made.append(element("td", column.text(row), `number ${column.className || ""}`));
    if (!isPair) {
      const cell = element("td", "", "copies");
      if (withSpread(row, () => "all")) {
        cell.append(drawCopies(row));
        const { shortest, longest, median } = row.spread;
        const odd = [shortest, longest].some((one) => isOdd(timeOfCopy(row, one), median));
        made.classList.toggle("odd", odd);
      }
      made.append(cell);
    }
    return made;
  }

  function makeHead(columns) {
    const head = element("thead");
    const row = element("tr");
    const header = (text, className) => {
      const made = element("th", undefined, className);
      made.scope = "col";
      made.append(element("span", text, "sort"));
      return made;
    };
    row.append(header("module", "name"), header("", "bars"));
    for (const column of columns) row.append(header(column.label, `number ${column.className || ""}`));
    if (!isPair) row.append(header("copies", "copies"));
    head.append(row);
    return head;
  }

  // ---- opening and selecting

  // Opens a row to what is inside (its key) or to its copies (with a star), or closes it (nothing).
  function setOpen(row, key) {
    for (const other of [keyOf(row), `${keyOf(row)}*`]) open.delete(other);
    if (key) open.add(key);
    fill(keyOf(row));
  }

  // Copies take the place of what is inside, and give it back.
  function toggleCopies(row) {
    const key = keyOf(row);
    setOpen(row, !open.has(`${key}*`) ? `${key}*` : childrenOf(row).length ? key : "");
  }

  // The twist opens what is inside, or the copies of a module with nothing inside.
  function turn(row, wanted) {
    const key = keyOf(row);
    const isOpen = open.has(key) || open.has(`${key}*`);
    if (row.isSelf || isOpen === wanted) return false;
    const target = childrenOf(row).length ? key : copiesOf(row).length ? `${key}*` : "";
    if (target) setOpen(row, wanted ? target : "");
    return Boolean(target);
  }

  function choose(row) {
    const selection = selectNode(modules, row.tree, row.node, row.isSelf);
    select([[modules.at, model.chosen[modules.at]?.id === selection.id ? null : selection]]);
  }

  // A module that was selected elsewhere, in the flame view, may be inside others that are closed.
  function reveal(chosen) {
    if (chosen?.tree !== folded) return;
    for (let node = folded.parents[chosen.node]; node >= 0; node = folded.parents[node]) {
      if (!open.has(`f${node}*`)) open.add(`f${node}`);
    }
  }

  function describe(row) {
    const sums = sumsOf(row.tree);
    const [node, path] = [indexOf(row), nameNode(row.tree, row.node)];
    const lines = [{ text: row.isSelf ? `${path} ${SELF}` : path, className: "name" }];
    part.runs.forEach((name, run) => {
      const share = formatShare(sums.times[run][node] / (model.totals[run] || 1));
      const count = `${formatCount(sums.counts[run][node])} ${part.what} per ${part.unit}`;
      lines.push(`${name ? `${name}: ` : ""}${formatTime(sums.times[run][node])}, ${share} of all ${part.what}, ${count}`);
    });
    withSpread(row, ({ items, shortest, longest }) => {
      const say = (one) => `${formatTime(timeOfCopy(row, one))} (${single.paths[one]})`;
      lines.push(`${formatTime(timeOf(row) / items.length)} each, ${say(shortest)} to ${say(longest)}`);
      return "";
    });
    for (const [kind, time] of sums.classesOf(0, node).slice(0, 4)) {
      lines.push({ text: `${model.classOf(kind)} ${formatTime(time)}`, colour: colourOf(model.classOf(kind)) });
    }
    return lines;
  }

  const rowOf = (event) => shown[[...rows.rows].indexOf(event.target.closest("tr"))];
  rows.addEventListener("click", (event) => {
    const row = rowOf(event);
    if (event.target.closest(".twist")) turn(row, !(open.has(keyOf(row)) || open.has(`${keyOf(row)}*`)));
    else choose(row);
  });
  rows.addEventListener("pointermove", (event) => tip.show(event.clientX, event.clientY, describe(rowOf(event))));
  rows.addEventListener("pointerleave", () => tip.hide());
  rows.addEventListener("focusin", (event) => {
    for (const other of rows.querySelectorAll('tr[tabindex="0"]')) other.tabIndex = -1;
    event.target.closest("tr").tabIndex = 0;
  });
  rows.addEventListener("keydown", (event) => {
    const [here, row] = [event.target.closest("tr"), rowOf(event)];
    const steps = { ArrowUp: -1, ArrowDown: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (event.key in steps) moveAmong([...rows.rows], here, steps[event.key]);
    else if (event.key === "ArrowRight") turn(row, true) || moveAmong([...rows.rows], here, 1);
    else if (event.key === "ArrowLeft") {
      if (turn(row, false)) return;
      const above = shown.slice(0, shown.indexOf(row)).findLastIndex((other) => other.depth < row.depth);
      rows.rows[above]?.focus();
    } else if (event.key === "*" && copiesOf(row).length) toggleCopies(row);
    else if (event.key === "Enter" || event.key === " ") choose(row);
    else return;
    event.preventDefault();
  });

  function fill(focused) {
    shown = listRows();
    const columns = columnsOf();
    rows.replaceChildren(...shown.map((row) => makeRow(row, columns)));
    table.replaceChildren(makeHead(columns), rows);
    const target = [...rows.rows].find((row) => row.dataset.key === focused);
    if (target) target.focus();
    if (rows.rows.length) (target ?? rows.rows[0]).tabIndex = 0;
  }

  function update() {
    // As for the lists, a selection of modules does not narrow the modules.
    const left = model.rowsLeft(modules.at);
    foldedSums = sumModules(model, folded, left);
    singleSums = sumModules(model, single, left);
    most = largest(topRows(), timeOf) || 1;
    const inPhase = (phase) => topRows().reduce((sum, row) => sum + foldedSums.phaseOf(0, row.node, phase), 0);
    const all = phaseAt < 0 ? [] : part.dimensions[phaseAt].values.map((_, phase) => phase);
    phases = all.filter((phase) => inPhase(phase) > 0);
    if (!isOpened) openSome();
    isOpened = true;
    reveal(model.chosen[modules.at]);
    const focused = rows.contains(document.activeElement) ? document.activeElement.closest("tr").dataset.key : null;
    fill(focused);
  }

  return { update };
}
