// What charts of points share: scales, axes, and marks that can be told apart without their colour.
const axes = (() => {
  const SHAPES = ["circle", "square", "up", "diamond", "down", "cross"];
  const SVG = "http://www.w3.org/2000/svg";
  // The corners of each shape, in units of its size; a circle has none.
  const CORNERS = {
    square: [[-0.85, -0.85], [0.85, -0.85], [0.85, 0.85], [-0.85, 0.85]],
    up: [[0, -1.1], [1.05, 0.8], [-1.05, 0.8]],
    diamond: [[0, -1.2], [1.2, 0], [0, 1.2], [-1.2, 0]],
    down: [[0, 1.1], [1.05, -0.8], [-1.05, -0.8]],
    cross: [
      [-0.4, -1.1], [0.4, -1.1], [0.4, -0.4], [1.1, -0.4], [1.1, 0.4], [0.4, 0.4],
      [0.4, 1.1], [-0.4, 1.1], [-0.4, 0.4], [-1.1, 0.4], [-1.1, -0.4], [-0.4, -0.4],
    ],
  };
  const shapeOf = (index) => SHAPES[index % SHAPES.length];

  // From values to pixels. Values that are not on a logarithmic axis, such as the low end of a spread, lie at its end.
  function makeScale(low, high, isLog, from, to) {
    const read = isLog ? (value) => Math.log(Math.max(value, low)) : (value) => value;
    const [start, length] = [read(low), read(high) - read(low) || 1];
    return (value) => from + ((read(value) - start) / length) * (to - from);
  }

  // A logarithmic axis has a margin, so that no mark touches the frame; a linear one begins at zero.
  function findDomain(values, isLog, most) {
    const finite = values.filter((value) => value !== null && (value > 0 || !isLog));
    const [least, greatest] = [Math.min(...finite), Math.max(...finite)];
    if (isLog) {
      const margin = Math.max(1.1, (greatest / least) ** 0.05);
      return [least / margin, greatest * margin];
    }
    const [low, high] = [Math.min(0, least), greatest > Math.min(0, least) ? greatest : Math.min(0, least) + 1];
    const { ticks } = page.makeTicks(low, high, most);
    const step = ticks.length > 1 ? ticks[1] - ticks[0] : high - low;
    return [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
  }

  // `x` and `y` are { scale, ticks: [{ value, text }], title }; `frame` is where the plot lies.
  function draw(context, theme, frame, x, y) {
    const { left, top, width, height } = frame;
    Object.assign(context, { strokeStyle: theme.grid, fillStyle: theme.faint, lineWidth: 1, font: plotting.FONT });
    Object.assign(context, { textAlign: "right", textBaseline: "middle" });
    for (const { value, text } of y.ticks) {
      const at = Math.round(y.scale(value)) + 0.5;
      plotting.rule(context, left, at, left + width, at);
      context.fillText(text, left - 8, at);
    }
    Object.assign(context, { textAlign: "center", textBaseline: "top" });
    let free = -Infinity;
    for (const { value, text } of x.ticks) {
      const at = Math.round(x.scale(value)) + 0.5;
      context.strokeStyle = theme.grid;
      plotting.rule(context, at, top, at, top + height);
      const half = context.measureText(text).width / 2;
      if (at - half < free) continue;
      context.fillText(text, at, top + height + 8);
      free = at + half + 6;
    }
    context.strokeStyle = theme.hatch;
    plotting.rule(context, left, top + height + 0.5, left + width, top + height + 0.5);
    context.fillStyle = theme.ink;
    context.fillText(x.title, left + width / 2, top + height + 27);
    if (!y.title) return;
    // Above its axis and not along it: nobody turns their head.
    Object.assign(context, { textAlign: "left", textBaseline: "bottom" });
    context.fillText(y.title, frame.titleLeft, top - 9);
  }

  function tracePath(context, shape, x, y, size) {
    context.beginPath();
    if (shape === "circle") return context.arc(x, y, size, 0, 2 * Math.PI);
    for (const [across, down] of CORNERS[shape]) context.lineTo(x + across * size, y + down * size);
    return context.closePath();
  }

  function makeSwatch(shape) {
    const svg = document.createElementNS(SVG, "svg");
    const mark = document.createElementNS(SVG, shape === "circle" ? "circle" : "polygon");
    svg.setAttribute("viewBox", "-1.4 -1.4 2.8 2.8");
    svg.setAttribute("class", "mark");
    svg.setAttribute("aria-hidden", "true");
    if (shape === "circle") mark.setAttribute("r", "1");
    else mark.setAttribute("points", CORNERS[shape].map((corner) => corner.join(",")).join(" "));
    svg.append(mark);
    return svg;
  }

  const quantity = ({ label, unit }) => (unit ? `${label} (${unit})` : label);

  return { shapeOf, makeScale, findDomain, draw, tracePath, makeSwatch, quantity };
})();
