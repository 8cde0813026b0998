// Tables: sorting by a header, searching, columns on request. The rows are there already; this orders and hides them.

function rawOf(cell) {
  return cell.dataset.v === undefined ? null : Number(cell.dataset.v);
}

// Numbers by value with what is missing last either way, words as people sort them.
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
  // Numbers are looked at from the largest.
  const order = before ? (before === "descending" ? "ascending" : "descending") : isNumber ? "descending" : "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", order);
  const body = table.tBodies[0];
  const read = (row) => (isNumber ? rawOf(row.cells[at]) : row.cells[at].textContent);
  const compare = compareCells(isNumber, order === "ascending" ? 1 : -1);
  const rows = [...body.rows].map((row) => [read(row), row]).sort((a, b) => compare(a[0], b[0]));
  body.append(...rows.map(([, row]) => row));
  say(`sorted by ${header.textContent}, ${order}`);
}

function moveAmong(items, from, step) {
  const next = items[Math.max(0, Math.min(items.length - 1, items.indexOf(from) + step))];
  next?.focus();
}

// Arrow keys move among the headers, as between the bars of a breakdown.
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
  const tools = figure.querySelector(".tools");
  if (!tools) continue;
  tools.hidden = false;
  const search = tools.querySelector(".search");
  if (search) {
    const found = tools.querySelector(".found");
    let texts = null;
    const filter = () => {
      // Not before it is asked for: a page with thousands of rows opens sooner.
      texts ??= [...table.tBodies[0].rows].map((row) => [row, row.textContent.toLowerCase()]);
      const wanted = search.value.trim().toLowerCase();
      let count = 0;
      for (const [row, text] of texts) count += (row.hidden = !text.includes(wanted)) ? 0 : 1;
      const all = `${formatNumber(texts.length, 0)} rows`;
      found.textContent = wanted ? `${formatNumber(count, 0)} of ${all}` : all;
    };
    search.addEventListener("input", filter);
    addEventListener("clear", () => {
      if (!search.value) return;
      search.value = "";
      filter();
    });
  }
  const more = tools.querySelector(".more-columns");
  more?.addEventListener("click", () => {
    const isOn = table.classList.toggle("all");
    more.setAttribute("aria-pressed", String(isOn));
  });
}
