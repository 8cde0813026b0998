// The boxes of the flame view: phase, module, operator and kernel below each other, each as wide as its time.

// Adds up rows to boxes. Unknown names have no box, and neither has a module that only repeats its phase: `(optimizer)`.
function growFlame(model, rows, run, isFolded) {
  const { part, modules } = model;
  const [phases, ops, kernels, classes] = ["phase", "op", "kernel", "class"].map(
    (key) => part.dimensions.findIndex((dimension) => dimension.key === key));
  const tree = modules && (isFolded ? modules.folded : modules.single);
  const placeOf = (at, row) => (at < 0 ? -1 : part.places[at][row]);
  const nameOf = (at, value) => (value < 0 ? "unknown" : part.dimensions[at].values[value]);
  const KINDS = ["phase", "module", "op", "kernel"];
  // A step has tens of thousands of boxes: those without anything inside have no maps. `order` is the place of a box among
  // its siblings, null if they are sorted by time.
  const make = (kind, parent, { name, select, order }) => ({
    kind, parent, name, select, order, depth: parent ? parent.depth + 1 : 0, time: 0, count: 0, group: -1,
    inside: null, copies: null, sources: null,
  });
  const root = make("root", null, { name: "", select: null, order: 0 });
  const hasPhases = phases >= 0 && part.dimensions[phases].values.some((name) => name !== "unknown");
  let [time, count, group] = [0, 0, -1];

  function add(box) {
    box.time += time;
    box.count += count;
    box.group = group;
    return box;
  }

  // The box of a number inside another. Modules, operators and kernels may be next to each other.
  function enter(box, kind, number, describe) {
    const key = KINDS.length * number + KINDS.indexOf(kind);
    box.inside ??= new Map();
    let next = box.inside.get(key);
    if (!next) box.inside.set(key, (next = make(kind, box, describe())));
    return add(next);
  }

  const enterValue = (box, kind, at, value, order) => enter(box, kind, value, () => (
    { name: nameOf(at, value), select: { at, value }, order }));

  function enterModules(box, value) {
    tree.chains[value].forEach((node, depth) => {
      box = enter(box, "module", node, () => ({ name: tree.labels[node], select: { tree, node }, order: tree.order[node] }));
      if (!isFolded || tree.copies[node] < 2) return;
      const one = modules.single.chains[value][depth];
      box.copies ??= new Map();
      box.copies.set(one, (box.copies.get(one) || 0) + time);
    });
    return box;
  }

  for (const row of rows) {
    [time, count, group] = [part.times[run][row], part.counts[run][row], placeOf(classes, row)];
    if (!time) continue;
    let box = add(root);
    const [phase, module, op] = [placeOf(phases, row), modules ? placeOf(modules.at, row) : -1, placeOf(ops, row)];
    if (hasPhases) box = enterValue(box, "phase", phases, phase, phase);
    const path = module < 0 ? "unknown" : nameOf(modules.at, module);
    if (path !== "unknown" && path !== `(${nameOf(phases, phase)})`) box = enterModules(box, module);
    if (nameOf(ops, op) !== "unknown") {
      box = enterValue(box, "op", ops, op, null);
      const line = Array.isArray(part.sources) ? part.sources[row] : part.sources;
      if (line >= 0) (box.sources ??= new Map()).set(line, (box.sources.get(line) || 0) + time);
    }
    if (kernels >= 0) enterValue(box, "kernel", kernels, placeOf(kernels, row), null);
  }
  return layFlame(root, classes < 0 ? 0 : part.dimensions[classes].values.length);
}

// Gives each box its start, as a time from the left, and the class with most of its time. Lists the boxes of each level from
// the left: phases and modules in their order, then the operators of the module itself, the longest first.
function layFlame(root, numClasses) {
  const levels = [];
  const sums = [];
  const before = (a, b) => (a.order === null) - (b.order === null) || (a.order === null ? b.time - a.time : a.order - b.order);

  function place(box, start) {
    const { depth } = box;
    const sum = (sums[depth] ??= new Float64Array(numClasses)).fill(0);
    (levels[depth] ??= []).push(box);
    Object.assign(box, { start, children: box.inside ? [...box.inside.values()].sort(before) : [] });
    box.inside = null;
    for (const one of box.children) {
      place(one, start);
      start += one.time;
      for (let kind = 0; kind < numClasses; kind++) sum[kind] += sums[depth + 1][kind];
    }
    if (!box.children.length && box.group >= 0) sum[box.group] = box.time;
    else if (numClasses) box.group = sum.reduce((most, time, kind) => (time > sum[most] ? kind : most), 0);
  }

  place(root, 0);
  return { root, levels };
}
