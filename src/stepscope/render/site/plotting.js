// What the canvas charts share: a canvas at screen resolution, text that fits, and a view that moves with pointer, fingers
// and keys. Independent of what is drawn.
const plotting = (() => {
  const FAMILY = getComputedStyle(document.documentElement).getPropertyValue("--font").trim();
  const FONT = `12px ${FAMILY}`;
  const BOLD_FONT = `bold ${FONT}`;
  // A press that moves less than this, in pixels, is a click.
  const CLICK_PIXELS = 4;

  // ---- canvases

  const findRatio = () => Math.min(window.devicePixelRatio || 1, 3);

  // Resizes and clears a canvas; sizes and later drawing are in CSS pixels.
  function openCanvas(canvas, width, height) {
    const ratio = findRatio();
    const [columns, rows] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== columns || canvas.height !== rows) {
      Object.assign(canvas, { width: columns, height: rows });
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, columns, rows);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    Object.assign(context, { font: FONT, direction: "ltr", textBaseline: "middle", globalAlpha: 1 });
    return context;
  }

  // Draws at most once per frame. A chart without layout cannot be drawn on.
  function onceAFrame(draw) {
    let frame = 0;
    return () => {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        draw();
      });
    };
  }

  // ---- colours

  const pack = ([red, green, blue], alpha = 255) => ((alpha << 24) | (blue << 16) | (green << 8) | red) >>> 0;

  // ---- lines and text

  function rule(context, x1, y1, x2, y2) {
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x2, y2);
    context.stroke();
  }

  // As much of a text as fits the width, or nothing if that is too little to read.
  function fitText(context, text, width) {
    if (width < 8) return "";
    const whole = context.measureText(text).width;
    if (whole <= width) return text;
    let low = 0;
    let high = text.length;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (context.measureText(`${text.slice(0, middle)}…`).width <= width) low = middle;
      else high = middle - 1;
    }
    return low >= 3 ? `${text.slice(0, low)}…` : "";
  }

  // ---- moving

  // Turns events into calls: `zoom(factor, share, isShift)`, `pan(across, up)` in shares of the view, `reset()`,
  // `point(place, event)` with null once the pointer has left, `click(place, event)`. `frame()` is the plot's rectangle in
  // the canvas. The wheel scrolls the page until the chart is clicked or Ctrl is held, and when the chart cannot zoom out
  // further: a page must not stop scrolling because a chart moves under the pointer.
  function makeMovable(canvas, { frame, zoom, pan, reset, point, click, isWhole, keys = {}, wheelIsFree = false }) {
    const fingers = new Map();
    let pressed = null;
    const placeOf = (event) => ({ x: event.offsetX, y: event.offsetY });
    canvas.addEventListener("wheel", (event) => {
      const isMeant = wheelIsFree || event.ctrlKey || event.metaKey || document.activeElement === canvas;
      const turn = event.deltaY || event.deltaX;
      if (!isMeant || (turn > 0 && isWhole() && !event.ctrlKey)) return;
      event.preventDefault();
      const { left, top, width, height } = frame();
      const factor = Math.exp(Math.max(-1, Math.min(1, turn * (event.ctrlKey ? 0.006 : 0.0022))));
      zoom(factor, { x: (event.offsetX - left) / width, y: (event.offsetY - top) / height }, event.shiftKey);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      fingers.set(event.pointerId, placeOf(event));
      pressed = fingers.size === 1 ? placeOf(event) : null;
      canvas.classList.add("moving");
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = fingers.get(event.pointerId);
      const now = placeOf(event);
      point(now, event);
      if (!before) return;
      if (pressed && Math.hypot(now.x - pressed.x, now.y - pressed.y) > CLICK_PIXELS) pressed = null;
      const others = [...fingers].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
      fingers.set(event.pointerId, now);
      const { left, width, height } = frame();
      if (!others.length) {
        pan((before.x - now.x) / width, (now.y - before.y) / height);
      } else {
        const [was, is] = [before, now].map((place) => Math.max(Math.abs(place.x - others[0].x), 1));
        zoom(was / is, { x: (others[0].x - left) / width, y: 0 }, false);
      }
    });
    const release = (event) => {
      fingers.delete(event.pointerId);
      canvas.classList.toggle("moving", fingers.size > 0);
      if (event.type === "pointerup" && pressed) {
        point(pressed, event);
        click?.(pressed, event);
      }
      pressed = null;
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    // After a touch, the tooltip stays until the next touch elsewhere.
    canvas.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && point(null, event));
    document.addEventListener("pointerdown", (event) => event.target !== canvas && point(null, event));
    canvas.addEventListener("dblclick", reset);
    const all = {
      ArrowLeft: () => pan(-0.1, 0),
      ArrowRight: () => pan(0.1, 0),
      "+": () => zoom(0.75, { x: 0.5, y: 1 }, false),
      "=": () => zoom(0.75, { x: 0.5, y: 1 }, false),
      "-": () => zoom(1 / 0.75, { x: 0.5, y: 1 }, false),
      0: reset,
      ...keys,
    };
    canvas.addEventListener("keydown", (event) => {
      if (!all[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      all[event.key]();
    });
  }

  return {
    FONT, BOLD_FONT, findRatio, openCanvas, onceAFrame, pack, rule, fitText, makeMovable,
  };
})();
