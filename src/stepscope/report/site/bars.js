// Bars: lengths side by side, grouped or on top of each other, with their values at the ends.

charts.bars = (root, part, page) => {
  const body = bodyOf(root);
  const pieces = [];
  if (!part.labels.length || !part.series.length) {
    body.append(element("p", "Nothing to draw.", "quiet"));
    return { redraw() {} };
  }
  const column = (at) => part.values.map((values) => values[at]);
  const sum = (values) => values.reduce((total, value) => total + Math.max(0, value || 0), 0);
  const highest = (values) => Math.max(0, ...values.map((value) => Math.abs(value || 0)));
  const most = Math.max(...part.labels.map((label, at) => (part.stacked ? sum : highest)(column(at)))) || 1;

  function makePiece(series, value, text, label) {
    const piece = element("i");
    piece.style.width = `${(100 * Math.abs(value || 0)) / most}%`;
    pieces.push([piece, part.series[series]]);
    const lines = [{ text: label, className: "name" }, part.series.length > 1 ? `${part.series[series]}: ${text}` : text];
    piece.addEventListener("pointermove", (event) => page.tip.show(event.clientX, event.clientY, lines));
    piece.addEventListener("pointerleave", () => page.tip.hide());
    return piece;
  }

  function makeTrack(shown, text) {
    const track = element("div", "", "track");
    track.append(...shown, element("span", text, "value"));
    return track;
  }

  const list = element("div", "", "bar-list");
  part.labels.forEach((label, at) => {
    const name = element("div", label, "name");
    const tracks = element("div", "", "tracks");
    const texts = part.texts.map((column) => column[at]);
    const values = column(at);
    if (part.stacked) {
      const shown = values.map((value, series) => makePiece(series, value, texts[series], label));
      tracks.append(makeTrack(shown, part.totals[at]));
      const said = texts.map((text, series) => `${part.series[series]} ${text}`).join(", ");
      tracks.append(element("span", said, "unseen"));
    } else {
      values.forEach((value, series) => tracks.append(
        makeTrack(value === null ? [] : [makePiece(series, value, texts[series], label)], texts[series])));
    }
    list.append(name, tracks);
  });
  if (part.series.length > 1) {
    const legend = element("ul", "", "legend");
    for (const series of part.series) {
      const item = element("li");
      const dot = element("i", "", "dot");
      pieces.push([dot, series]);
      item.append(dot, series);
      legend.append(item);
    }
    body.append(legend);
  }
  body.append(list);
  const redraw = () => pieces.forEach(([piece, series]) => paintSwatch(piece, page.colourOf(series)));
  redraw();
  return { redraw };
};
