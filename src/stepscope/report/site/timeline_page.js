// The page of one timeline: its chart, and the table of its largest pieces. The last part of its script.
const MOST_ROWS = 200;
const figure = document.querySelector("figure.chart");
// Nothing else on this page needs the wheel.
const chart = charts.timeline(figure, data, { ...page, wheelIsFree: true });

function buildTable() {
  const body = document.getElementById("pieces");
  for (const piece of chart.pieces.slice(0, MOST_ROWS)) {
    const row = element("tr");
    row.tabIndex = 0;
    row.dataset.piece = piece.index;
    row.setAttribute("aria-selected", "false");
    row.append(element("td", chart.formatHeight(piece.size), "number"), element("td", piece.label));
    row.append(element("td", chart.areas[piece.area].name));
    for (const slice of [piece.start, piece.end]) {
      row.append(element("td", chart.formatTime(chart.timeOf(slice)), "number when"));
    }
    row.addEventListener("click", () => chart.choose(piece.index));
    row.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      chart.choose(piece.index);
    });
    body.append(row);
  }
  chart.listenToChoice((chosen) => {
    for (const row of body.children) row.setAttribute("aria-selected", String(Number(row.dataset.piece) === chosen));
  });
  const all = formatNumber(chart.pieces.length, 0);
  if (chart.pieces.length > MOST_ROWS) {
    document.getElementById("rest").textContent = `The largest ${MOST_ROWS} of ${all}.`;
  }
}

buildTable();
onTheme(chart.redraw);
onResize(figure, chart.redraw);
darkness.addEventListener("change", themeChanged);
