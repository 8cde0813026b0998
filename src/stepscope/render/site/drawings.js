// Pointer, keys and legend of the charts that the page has as SVG. Each mark has a number, and `part.marks` the text of
// its tooltip; the legend switches all elements with the number of a class or series.
charts.figure = charts.roofline = charts.bars = charts.step = charts.aligned = (root, part, page) => {
  const plot = root.querySelector(".plot");
  if (!plot) return (root.chart = { redraw() {} });
  const drawings = [...plot.querySelectorAll("svg")];
  const buttons = [...root.querySelectorAll(".legend button")];
  const off = new Set();
  const boxes = new Map();
  let [chosen, isTelling] = [-1, false];
  const isShown = ({ group }) => !off.has(group);

  // ---- the tooltip

  function lineOf(mark, className) {
    const colour = part.groups.length ? page.colourOf(part.groups[mark.group]) : undefined;
    return { text: mark.lines[0], className, colour };
  }

  // The tooltip of a point with a place lists all points there, the selected one first.
  function describe(at) {
    const mark = part.marks[at];
    if (mark.place === undefined) {
      return mark.lines.map((text, row) => ({ ...(row === 1 ? { ...lineOf(mark, ""), text } : { text }),
        className: row === 0 ? "name" : row > 5 ? "of" : "" }));
    }
    const others = part.marks.filter((other) => other !== mark && other.place === mark.place && isShown(other));
    return [{ text: part.places[mark.place], className: "of" }, lineOf(mark, "name"), ...others.map((other) => lineOf(other, ""))];
  }

  // ---- the selected mark

  const marksOf = (at) => plot.querySelectorAll(`[data-mark="${at}"]`);

  function choose(at, x, y) {
    for (const mark of plot.querySelectorAll(".chosen, .told")) mark.classList.remove("chosen", "told");
    chosen = at;
    if (at >= 0) {
      const { place } = part.marks[at];
      part.marks.forEach((other, index) => {
        const isTold = index === at || (place !== undefined && other.place === place);
        if (isTold) for (const mark of marksOf(index)) mark.classList.add(index === at ? "chosen" : "told");
      });
      page.tip.show(x, y, describe(at));
    } else if (isTelling) page.tip.hide();
    isTelling = at >= 0;
  }

  // Measured when the pointer first enters a drawing: a hidden one has no boxes.
  function boxesOf(svg) {
    if (!boxes.has(svg)) {
      const marks = [...svg.querySelectorAll(".mark")];
      boxes.set(svg, marks.map((mark) => ({ at: Number(mark.dataset.mark), box: mark.getBBox() })));
    }
    return boxes.get(svg);
  }

  // The mark with the nearest edge; where several overlap, the smallest.
  function findNear(event) {
    const svg = drawings.find((one) => one.contains(event.target));
    if (!svg) return -1;
    const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    let [best, nearest, smallest] = [-1, part.reach, Infinity];
    for (const { at, box } of boxesOf(svg)) {
      const distance = Math.hypot(Math.max(box.x - x, 0, x - box.x - box.width), Math.max(box.y - y, 0, y - box.y - box.height));
      const isNearer = distance < nearest || (distance === nearest && box.width < smallest);
      if (isNearer && isShown(part.marks[at])) [best, nearest, smallest] = [at, distance, box.width];
    }
    return best;
  }

  // The centre of a mark, in window coordinates.
  function placeOf(at) {
    const mark = [...marksOf(at)].find((one) => one.getClientRects().length);
    const box = (mark ?? plot).getBoundingClientRect();
    return { x: box.left + box.width / 2, y: box.top + box.height / 2 };
  }

  function step(by) {
    const order = part.marks.map((_, at) => at).filter((at) => isShown(part.marks[at]) && marksOf(at).length);
    if (!order.length) return;
    const at = order[Math.min(Math.max(order.indexOf(chosen) + by, 0), order.length - 1)];
    const { x, y } = placeOf(at);
    choose(at, x, y);
    page.say(describe(at).map((line) => line.text).join(", "));
  }

  // ---- the legend: hides and shows series, or shows one class only

  function press(button) {
    const group = Number(button.dataset.group);
    if (part.isOnlyOne) {
      const isAlone = button.getAttribute("aria-pressed") === "true";
      off.clear();
      if (!isAlone) part.groups.forEach((_, other) => other !== group && off.add(other));
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button && !isAlone));
    } else {
      if (!off.delete(group)) off.add(group);
      button.setAttribute("aria-pressed", String(!off.has(group)));
    }
    for (const one of plot.querySelectorAll("[data-group]")) one.classList.toggle("off", off.has(Number(one.dataset.group)));
  }

  for (const button of buttons) button.addEventListener("click", () => press(button));
  for (const item of root.querySelectorAll("ol [data-mark]")) {
    item.addEventListener("pointermove", (event) => choose(Number(item.dataset.mark), event.clientX, event.clientY));
    item.addEventListener("pointerleave", () => choose(-1));
  }
  const look = (event) => choose(findNear(event), event.clientX, event.clientY);
  plot.addEventListener("pointermove", look);
  plot.addEventListener("pointerdown", look);
  plot.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && choose(-1));
  plot.addEventListener("blur", () => choose(-1));
  document.addEventListener("pointerdown", (event) => !plot.contains(event.target) && choose(-1));
  const keys = { ArrowRight: () => step(1), ArrowDown: () => step(1), ArrowLeft: () => step(-1), ArrowUp: () => step(-1) };
  keys.Escape = () => choose(-1);
  plot.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  root.chart = { marks: part.marks, placeOf, step, redraw() {} };
  return root.chart;
};
