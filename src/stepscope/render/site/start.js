// Starts the page: builds charts before they scroll into view, marks the current section, and connects the buttons.

const root = document.documentElement;
root.classList.add("js");

// ---- charts

const built = new Map();

function build(figure) {
  if (built.has(figure)) return;
  const { kind, key } = figure.dataset;
  const part = data.exhibits[key];
  built.set(figure, null);
  try {
    const chart = charts[kind](figure, part, page);
    built.set(figure, chart);
    onResize(figure, () => chart.redraw());
  } catch (error) {
    bodyOf(figure).append(element("p", `This chart could not be drawn: ${error.message}`, "quiet"));
    console.error(error);
  }
}

// Narrows the breakdown from another chart; returns whether it could.
page.narrow = (dimension, value) => {
  const figure = document.querySelector("figure.breakdown");
  if (figure) build(figure);
  return built.get(figure)?.narrow?.(dimension, value) ?? false;
};

const redrawAll = () => built.forEach((chart) => chart?.redraw());
const figures = [...document.querySelectorAll("figure.chart")];
const nearing = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    nearing.unobserve(entry.target);
    build(entry.target);
  }
}, { rootMargin: "600px" });
figures.forEach((figure) => nearing.observe(figure));
if (figures.length === 1) build(figures[0]);

// Build everything before a jump: a chart that grows on the way would push the target out of the window.
for (const link of document.querySelectorAll('a[href^="#"]')) link.addEventListener("click", () => figures.forEach(build));
if (location.hash) {
  figures.forEach(build);
  document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

// ---- theme

const themeButton = document.getElementById("theme");
themeButton.hidden = false;
themeButton.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length];
  setTheme(next);
  themeButton.textContent = `Theme: ${next}`;
});
darkness.addEventListener("change", themeChanged);
onTheme(redrawAll);

// Print all charts, in the light theme.
let themeOnScreen = root.dataset.theme;
addEventListener("beforeprint", () => {
  themeOnScreen = root.dataset.theme;
  figures.forEach(build);
  setTheme("light");
});
addEventListener("afterprint", () => setTheme(themeOnScreen));

// ---- sections

const links = new Map([...document.querySelectorAll("nav.sections li a")].map((link) => [link.hash.slice(1), link]));
const places = [...links.keys()].map((id) => document.getElementById(id)).filter(Boolean);
let current = null;

// The last section that starts above the upper third of the window; at the end of the page, the last one.
function markSection() {
  const line = innerHeight / 3;
  const isAtEnd = scrollY > 0 && scrollY + innerHeight >= root.scrollHeight - 2;
  const begun = places.filter((place) => place.getBoundingClientRect().top <= line);
  const here = isAtEnd ? places[places.length - 1] : begun[begun.length - 1] || places[0];
  if (!here || here === current) return;
  if (current) links.get(current.id).removeAttribute("aria-current");
  current = here;
  const link = links.get(here.id);
  link.setAttribute("aria-current", "true");
  const list = link.closest("ul");
  // Not scrollIntoView, which would move the page too.
  list.scrollLeft = link.offsetLeft - list.offsetLeft - (list.clientWidth - link.offsetWidth) / 2;
}

let isMarking = false;
function markSoon() {
  if (isMarking) return;
  isMarking = true;
  requestAnimationFrame(() => {
    isMarking = false;
    markSection();
  });
}
addEventListener("scroll", () => {
  tip.hide();
  markSoon();
}, { passive: true });
addEventListener("resize", markSoon);
markSection();

// ---- copying

// A browser may refuse the clipboard to a local file: then the text is selected, ready to copy.
async function copy(box, made) {
  const code = box.querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
    made.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(code);
    made.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
  }
  say(made.textContent);
  setTimeout(() => { made.textContent = "Copy"; }, 2000);
}

for (const box of document.querySelectorAll(".copyable")) {
  const made = box.querySelector("button.copy");
  made.hidden = false;
  made.addEventListener("click", () => copy(box, made));
}

// ---- keys

addEventListener("keydown", (event) => {
  const isTyping = event.target.closest?.("input, textarea, select");
  if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) {
    const figure = document.querySelector("figure.breakdown");
    if (figure) build(figure);
    const search = document.querySelector(".kernels .search") || document.querySelector(".search");
    if (!search) return;
    event.preventDefault();
    search.focus();
    search.select();
  } else if (event.key === "Escape") {
    tip.hide();
    for (const hint of document.querySelectorAll(".hint[open]")) hint.open = false;
    dispatchEvent(new Event("clear"));
  }
});
