// Tables: sort by a header, search, show all rows and columns. The page has all rows; this sorts and hides them.

function rawOf(cell) {
  return cell.dataset.v === undefined ? null : Number(cell.dataset.v);
}

// Numbers by value, with missing ones last in both directions; text alphabetically, with numbers in it by value.
const wordOrder = new Intl.Collator("en", { numeric: true, sensitivity: "base" });
function compareCells(isNumber, sign) {
  return (a, b) => {
    if (!isNumber) return sign * wordOrder.compare(a, b);
    const isMissing = (value) => value === null || Number.isNaN(value);
    if (isMissing(a) || isMissing(b)) return isMissing(a) - isMissing(b);
    return sign * (a - b);
  };
}

function sortTable(table, header) {
  const at = header.cellIndex;
  const isNumber = header.classList.contains("number");
  const before = header.getAttribute("aria-sort");
  // The first click on a column of numbers puts the largest on top.
  const order = before ? (before === "descending" ? "ascending" : "descending") : isNumber ? "descending" : "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", order);
  const body = table.tBodies[0];
  const read = (row) => (isNumber ? rawOf(row.cells[at]) : row.cells[at].textContent);
  const compare = compareCells(isNumber, order === "ascending" ? 1 : -1);
  const rows = [...body.rows].map((row) => [read(row), row]).sort((a, b) => compare(a[0], b[0]));
  body.append(...rows.map(([, row]) => row));
  say(`Sorted by ${header.textContent}, ${order}`);
}

// A button that shows more or less of something: its label says what the next press does.
function makeToggle(control, [more, fewer], onToggle) {
  let isOn = false;
  control.hidden = false;
  control.textContent = more;
  control.addEventListener("click", () => {
    isOn = !isOn;
    control.textContent = isOn ? fewer : more;
    onToggle(isOn);
    control.scrollIntoView({ block: "nearest" });
  });
}

function moveAmong(items, from, step) {
  const next = items[Math.max(0, Math.min(items.length - 1, items.indexOf(from) + step))];
  next?.focus();
}

// Arrow keys move between the headers, as they do between the bars of a breakdown.
function walkHeaders(head) {
  head.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !event.target.matches("button.sort")) return;
    event.preventDefault();
    moveAmong([...head.querySelectorAll("button.sort")].filter((item) => item.offsetParent), event.target, step);
  });
}

for (const figure of document.querySelectorAll("figure.table")) {
  const table = figure.querySelector("table");
  if (!table) continue;
  for (const header of table.tHead.rows[0].cells) {
    header.querySelector("button").addEventListener("click", () => sortTable(table, header));
  }
  walkHeaders(table.tHead);
  const all = figure.querySelector(".all-rows");
  if (all) {
    table.classList.add("folded");
    makeToggle(all, [all.textContent, "Show fewer"], (isOn) => table.classList.toggle("folded", !isOn));
  }
  const tools = figure.querySelector(".tools");
  if (!tools) continue;
  tools.hidden = false;
  const search = tools.querySelector(".search");
  if (search) {
    const found = tools.querySelector(".found");
    let texts = null;
    const filter = () => {
      // Only when needed: a page with thousands of rows opens sooner.
      texts ??= [...table.tBodies[0].rows].map((row) => [row, row.textContent.toLowerCase()]);
      const wanted = search.value.trim().toLowerCase();
      let count = 0;
      for (const [row, text] of texts) count += (row.hidden = !text.includes(wanted)) ? 0 : 1;
      const total = `${formatNumber(texts.length, 0)} rows`;
      found.textContent = wanted ? `${formatNumber(count, 0)} of ${total}` : total;
      // A search shows all rows that match, also those that are folded away.
      table.classList.toggle("searched", Boolean(wanted));
      if (all) all.hidden = Boolean(wanted);
    };
    search.addEventListener("input", filter);
    addEventListener("clear", () => {
      if (!search.value) return;
      search.value = "";
      filter();
    });
  }
  const more = tools.querySelector(".more-columns");
  if (more) makeToggle(more, [more.textContent, "Show fewer columns"], (isOn) => table.classList.toggle("all", isOn));
}
