// The table of kernels under the breakdown: the ones that match its selections, searched and sorted.

const MOST_OPEN = 8; // rows, until the reader asks for all
const MOST_ROWS = 200;

// For each kernel: time, count, shortest and longest in each run, and the class with most of its time.
function sumKernels(model, at) {
  const { part, numRuns } = model;
  const byKernel = new Map();
  for (const row of model.rowsLeft(at)) {
    const value = part.places[at][row];
    let kernel = byKernel.get(value);
    if (!kernel) {
      const zeros = () => new Array(numRuns).fill(0);
      const none = () => new Array(numRuns).fill(null);
      kernel = { value, kind: -1, most: -1, times: zeros(), counts: zeros(), shortest: none(), longest: none() };
      byKernel.set(value, kernel);
    }
    for (let run = 0; run < numRuns; run++) {
      kernel.times[run] += part.times[run][row];
      kernel.counts[run] += part.counts[run][row];
      const [short, long] = [part.shortest[run][row], part.longest[run][row]];
      if (short !== null) kernel.shortest[run] = Math.min(kernel.shortest[run] ?? Infinity, short);
      if (long !== null) kernel.longest[run] = Math.max(kernel.longest[run] ?? -Infinity, long);
      if (part.times[run][row] > kernel.most) {
        kernel.most = part.times[run][row];
        kernel.kind = model.classes < 0 ? -1 : part.places[model.classes][row];
      }
    }
  }
  return [...byKernel.values()];
}

// All values of a column have the same decimals.
const inMs = (ns) => (ns === null ? "–" : formatNumber(ns / 1e6, Math.abs(ns) < 1e9 ? 3 : 1));
const inUs = (ns) => (ns === null ? "–" : formatNumber(ns / 1e3, 2));
// A kernel that runs once in many steps must not show a count of 0.
const formatCount = (count) => formatNumber(count, Number.isInteger(count) ? 0 : count >= 0.05 ? 1 : undefined);

const signed = (text) => (/^[1-9]|^0.*[1-9]/.test(text) ? `+${text}` : text);

// What each column shows and sorts by. The difference between two runs is sorted by size, without its sign.
function kernelColumns(model, name) {
  const { part, totals } = model;
  const columns = [{ label: part.what.replace(/s$/, ""), read: name, text: name, className: "name" }];
  if (model.numRuns === 1) {
    // Time and count are rounded; their ratio must stay between the shortest and the longest.
    const mean = ({ times: [time], counts: [count], shortest: [least], longest: [most] }) =>
      (least === null ? null : Math.min(Math.max(time / (count || 1), least), most ?? Infinity));
    columns.push(
      { label: "ms", read: (kernel) => kernel.times[0], text: (kernel) => inMs(kernel.times[0]) },
      { label: "share", read: (kernel) => kernel.times[0], text: (kernel) => formatShare(kernel.times[0] / (totals[0] || 1)),
        className: "share" },
      { label: "count", read: (kernel) => kernel.counts[0], text: (kernel) => formatCount(kernel.counts[0]) },
      { label: "mean µs", read: mean, text: (kernel) => inUs(mean(kernel)) },
      { label: "min µs", read: (kernel) => kernel.shortest[0], text: (kernel) => inUs(kernel.shortest[0]), className: "spread" },
      { label: "max µs", read: (kernel) => kernel.longest[0], text: (kernel) => inUs(kernel.longest[0]), className: "spread" },
    );
    return columns;
  }
  const difference = (kernel) => kernel.times[1] - kernel.times[0];
  part.runs.forEach((run, at) => columns.push(
    { label: `${run} ms`, read: (kernel) => kernel.times[at], text: (kernel) => (kernel.shortest[at] !== null ? inMs(kernel.times[at]) : "–") }));
  columns.push({ label: "change ms", read: (kernel) => Math.abs(difference(kernel)),
    text: (kernel) => signed(inMs(difference(kernel))), className: "difference" });
  part.runs.forEach((run, at) => columns.push({ label: `${run} count`, read: (kernel) => kernel.counts[at],
    text: (kernel) => (kernel.shortest[at] !== null ? formatCount(kernel.counts[at]) : "–"), className: "spread" }));
  return columns;
}

function makeKernelTable(model, body, choose, clear) {
  const { part } = model;
  const at = part.dimensions.findIndex((dimension) => dimension.key === "kernel");
  if (at < 0) return { update() {} };
  const { values, details } = part.dimensions[at];
  const nameOf = (kernel) => values[kernel.value];
  const texts = values.map((value, index) => `${value}\n${details[index] || ""}`.toLowerCase());
  const columns = kernelColumns(model, nameOf);
  // In a comparison, the kernels that changed most come first.
  const state = { column: model.numRuns > 1 ? columns.findIndex((column) => column.className === "difference") : 1, sign: -1,
    most: MOST_ROWS, isOpen: false };

  const box = element("div", "", model.numRuns > 1 ? "kernels two" : "kernels");
  const tools = element("div", "", "tools");
  const search = element("input", undefined, "search");
  const found = element("output", "", "found");
  const scroll = element("div", "", "scroll tall");
  const table = element("table");
  table.setAttribute("role", "grid");
  table.setAttribute("aria-label", part.what);
  const rows = element("tbody");
  const more = button("", "quiet", () => {
    state.most += MOST_ROWS;
    update();
  });
  const fold = button("", "quiet all-rows", () => {
    state.isOpen = !state.isOpen;
    update();
    fold.scrollIntoView({ block: "nearest" });
  });
  Object.assign(search, { type: "search", placeholder: `Search ${part.what} by name (press /)` });
  search.setAttribute("aria-label", `Search ${part.what}`);
  const hidden = element("span", "", "found hidden-matches");
  tools.append(search, found, hidden);
  table.append(makeHead(), rows);
  scroll.append(table);
  box.append(tools, scroll, more, fold);
  body.append(box);

  function makeHead() {
    const head = element("thead");
    const row = element("tr");
    columns.forEach((column, index) => {
      const header = element("th", undefined, `${index ? "number " : ""}${column.className || ""}`);
      header.scope = "col";
      header.append(button(column.label, "sort", () => {
        if (state.column === index) state.sign = -state.sign;
        else Object.assign(state, { column: index, sign: index ? -1 : 1 });
        update();
        say(`Sorted by ${column.label}, ${state.sign < 0 ? "descending" : "ascending"}`);
      }));
      row.append(header);
    });
    head.append(row);
    walkHeaders(head);
    return head;
  }

  function makeRow(kernel, most) {
    const row = element("tr");
    row.dataset.value = kernel.value;
    row.tabIndex = -1;
    row.setAttribute("aria-selected", String(model.chosen[at]?.id === kernel.value));
    columns.forEach((column, index) => {
      const cell = element("td", index ? column.text(kernel) : "", `${index ? "number " : ""}${column.className || ""}`);
      if (!index) {
        cell.append(element("span", column.text(kernel)));
        const dot = element("i", "", "dot");
        paintSwatch(dot, colourOf(model.classOf(kernel.kind)));
        dot.title = model.classOf(kernel.kind);
        cell.prepend(dot);
      } else if (column.className === "share") {
        const bar = element("i", "", "share-bar");
        bar.style.width = `${(60 * kernel.times[0]) / most}px`;
        paintSwatch(bar, colourOf(model.classOf(kernel.kind)));
        cell.prepend(bar);
      }
      row.append(cell);
    });
    return row;
  }

  function update() {
    const wanted = search.value.trim().toLowerCase();
    const all = sumKernels(model, at);
    const fitting = all.filter((kernel) => texts[kernel.value].includes(wanted));
    const { read } = columns[state.column];
    const compare = compareCells(state.column > 0, state.sign);
    fitting.sort((a, b) => compare(read(a), read(b)) || a.value - b.value);
    const most = largest(fitting, (kernel) => kernel.times[0]) || 1;
    const focused = rows.contains(document.activeElement) ? document.activeElement.dataset.value : null;
    const isFolded = !state.isOpen && !wanted;
    const limit = isFolded ? MOST_OPEN : state.most;
    rows.replaceChildren(...fitting.slice(0, limit).map((kernel) => makeRow(kernel, most)));
    if (rows.rows.length) rows.rows[0].tabIndex = 0;
    if (focused !== null) [...rows.rows].find((row) => row.dataset.value === focused)?.focus();
    const headers = table.tHead.rows[0].cells;
    for (const header of headers) header.removeAttribute("aria-sort");
    headers[state.column].setAttribute("aria-sort", state.sign < 0 ? "descending" : "ascending");
    const left = fitting.length - Math.min(fitting.length, limit);
    more.hidden = isFolded || !left;
    more.textContent = `Show ${formatNumber(Math.min(left, MOST_ROWS), 0)} more of ${formatNumber(left, 0)}`;
    fold.hidden = Boolean(wanted) || fitting.length <= MOST_OPEN;
    fold.textContent = state.isOpen ? "Show fewer" : `Show all ${formatNumber(fitting.length, 0)} ${part.what}`;
    found.textContent = fitting.length === values.length ? `${formatNumber(values.length, 0)} ${part.what}`
      : `${formatNumber(fitting.length, 0)} of ${formatNumber(values.length, 0)} ${part.what}`;
    scroll.classList.toggle("short", rows.rows.length <= 12);
    tellHidden(wanted, fitting.length);
  }

  // A search looks only at what the selections leave: say so if they hide other matches.
  function tellHidden(wanted, numFound) {
    const filters = model.chosen.flatMap((selection, other) => (other !== at && selection ? [selection.name] : []));
    const numHidden = wanted && filters.length ? texts.filter((text) => text.includes(wanted)).length - numFound : 0;
    if (numHidden <= 0) return hidden.replaceChildren();
    const text = `${formatNumber(numHidden, 0)} ${numHidden === 1 ? "match" : "matches"} hidden by the ` +
      `${filters.length === 1 ? "filter" : "filters"} `;
    const names = filters.flatMap((name, index) => [index ? ", " : "", element("code", name)]);
    hidden.replaceChildren(text, ...names, " ", button("Clear", "quiet", () => {
      clear();
      search.focus();
    }));
    say(hidden.textContent);
  }

  function restart() {
    state.most = MOST_ROWS;
    update();
  }

  function linesOf(value) {
    const lines = (details[value] || "").split("\n").filter(Boolean);
    return [{ text: values[value], className: "name" }, ...lines.map((text, index) => ({ text, className: index ? "of" : "" }))];
  }

  const rowOf = (event) => event.target.closest("tbody tr");
  rows.addEventListener("pointermove", (event) => {
    const row = rowOf(event);
    if (row) tip.show(event.clientX, event.clientY, linesOf(Number(row.dataset.value)));
  });
  rows.addEventListener("pointerleave", () => tip.hide());
  rows.addEventListener("focusin", (event) => {
    const row = rowOf(event);
    // Tab returns to the row that last had the focus.
    for (const other of rows.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
    row.tabIndex = 0;
    if (!row.matches(":focus-visible")) return;
    const place = row.getBoundingClientRect();
    tip.show(place.left + 24, place.bottom - 10, linesOf(Number(row.dataset.value)));
  });
  rows.addEventListener("focusout", () => tip.hide());
  rows.addEventListener("click", (event) => choose(at, Number(rowOf(event).dataset.value)));
  rows.addEventListener("keydown", (event) => {
    const row = rowOf(event);
    const steps = { ArrowUp: -1, ArrowDown: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (event.key in steps) moveAmong([...rows.rows], row, steps[event.key]);
    else if (event.key === "Enter" || event.key === " ") choose(at, Number(row.dataset.value));
    else return;
    event.preventDefault();
  });
  search.addEventListener("input", restart);
  search.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown" || !rows.rows.length) return;
    event.preventDefault();
    rows.rows[0].focus();
  });
  addEventListener("clear", () => {
    if (!search.value) return;
    search.value = "";
    restart();
  });
  return { update: restart };
}
