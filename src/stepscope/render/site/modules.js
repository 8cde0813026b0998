// The modules of a breakdown as two trees: `folded`, in which the same module of alike layers is one node, and `single`.
// Both have the same form, so a chart can show either.

const SELF = "(self)";

// A number alone says nothing, and has the name above it: `blocks.3`. As in explain/trace/module_tree.py.
const LAST_NAME = /[^.]*(\.(\d+|\*))*$/;
const LAST_TWO_NAMES = /([^.]+\.)?[^.]*(\.(\d+|\*))*$/;
const labelModule = (above, name) => (above && /^(\d+|\*)(\.|$)/.test(name) ? `${above.match(LAST_NAME)[0]}.${name}` : name);

// A tree from the parents and names of its nodes, which have an `order`; `chains` has the nodes of each module from the top.
function growTree({ parents, names, chains, copies, order }) {
  const [paths, labels, tops] = [[], [], []];
  const children = parents.map(() => []);
  parents.forEach((parent, node) => {
    const above = parent < 0 ? "" : paths[parent];
    paths.push(parent < 0 ? names[node] : `${above}.${names[node]}`);
    labels.push(labelModule(above, names[node]));
    (parent < 0 ? tops : children[parent]).push(node);
  });
  return { size: parents.length, parents, labels, paths, children, tops, chains, copies, order };
}

function readModules(part) {
  const at = part.dimensions.findIndex((dimension) => dimension.key === "module");
  if (at < 0 || !part.tree) return null;
  const { names, nodes, singles } = part.tree;
  const copies = part.tree.parents.map((_, node) => (Array.isArray(part.tree.copies) ? part.tree.copies[node] : part.tree.copies));
  const chains = nodes.map((node) => {
    const chain = [];
    for (let here = node; here >= 0; here = part.tree.parents[here]) chain.unshift(here);
    return chain;
  });
  const folded = growTree({
    parents: part.tree.parents, names: part.tree.labels.map((label) => names[label]), chains, copies,
    order: part.tree.parents.map((_, node) => node),
  });
  const known = new Map();
  const [parents, own, roles] = [[], [], []];
  const singleChains = singles.map((texts, value) => {
    let parent = -1;
    return texts.map((text, depth) => {
      const key = `${parent}:${text}:${chains[value][depth]}`;
      if (!known.has(key)) {
        known.set(key, parents.length);
        parents.push(parent);
        own.push(names[text]);
        roles.push(chains[value][depth]);
      }
      return (parent = known.get(key));
    });
  });
  // In the order of the model, and by number among copies.
  const ranked = parents.map((_, one) => one).sort((a, b) => roles[a] - roles[b] || wordOrder.compare(own[a], own[b]));
  const order = [];
  ranked.forEach((one, rank) => (order[one] = rank));
  const single = growTree({ parents, names: own, chains: singleChains, copies: parents.map(() => 1), order });
  // The modules of each node. One that has the name of its node was merged over alike layers, and is none of them.
  const members = folded.parents.map(() => []);
  roles.forEach((node, one) => {
    if (copies[node] === 1 || single.paths[one] !== folded.paths[node]) members[node].push(one);
  });
  return { at, folded, single, roles, members };
}

// "12 × blocks.*", or the path of a module.
const nameNode = (tree, node) => `${tree.copies[node] > 1 ? `${formatNumber(tree.copies[node], 0)} × ` : ""}${tree.paths[node]}`;

// Whether a node is the selected one, or around it: in the same tree, or in the other.
function isAround(modules, own, chosen) {
  const roleOf = (tree, node) => (tree === modules.folded ? node : modules.roles[node]);
  for (let node = chosen.node; node >= 0; node = chosen.tree.parents[node]) {
    if (roleOf(chosen.tree, node) === roleOf(own.tree, own.node)) return true;
  }
  return false;
}

// A selection of a node with everything inside it, or of what it runs itself.
function selectNode(modules, tree, node, isSelf) {
  const isIn = tree.chains.map((chain) => (isSelf ? chain[chain.length - 1] === node : chain.includes(node)));
  const name = `${nameNode(tree, node)}${isSelf ? ` ${SELF}` : ""}`;
  return { id: `${tree === modules.folded ? "f" : "s"}${node}${isSelf ? "self" : ""}`, name, tree, node,
    includes: (value) => isIn[value] };
}

// Time, count, time by phase and by class of each node in each run. What a node runs itself follows all nodes, in the same
// order.
function sumModules(model, tree, rows) {
  const { part, numRuns, modules } = model;
  const size = 2 * tree.size;
  const of = (key) => part.dimensions.findIndex((dimension) => dimension.key === key);
  const [phases, classes] = [of("phase"), of("class")];
  const numOf = (at) => (at < 0 ? 1 : part.dimensions[at].values.length);
  const [numPhases, numClasses] = [numOf(phases), numOf(classes)];
  const zeros = (each) => part.runs.map(() => new Float64Array(size * each));
  const sums = { times: zeros(1), counts: zeros(1), phases: zeros(numPhases), classes: zeros(numClasses) };
  for (const row of rows) {
    const chain = tree.chains[part.places[modules.at][row]];
    const phase = phases < 0 ? 0 : part.places[phases][row];
    const kind = classes < 0 ? 0 : part.places[classes][row];
    for (let run = 0; run < numRuns; run++) {
      const [time, count] = [part.times[run][row], part.counts[run][row]];
      const add = (node) => {
        sums.times[run][node] += time;
        sums.counts[run][node] += count;
        sums.phases[run][node * numPhases + phase] += time;
        sums.classes[run][node * numClasses + kind] += time;
      };
      for (const node of chain) add(node);
      add(tree.size + chain[chain.length - 1]);
    }
  }
  const timeOf = (node) => Math.max(...sums.times.map((times) => times[node]));
  const phaseOf = (run, node, phase) => sums.phases[run][node * numPhases + phase];
  // The classes of a node, the longest first.
  const classesOf = (run, node) => [...sums.classes[run].subarray(node * numClasses, (node + 1) * numClasses)]
    .map((time, kind) => [kind, time]).filter(([, time]) => time > 0).sort((a, b) => b[1] - a[1]);
  return { ...sums, timeOf, phaseOf, classesOf };
}

// The shortest and the longest of the modules that a node is, the median, and all in model order; null if it is one.
function findSpread(times, items) {
  if (items.length < 2) return null;
  const sorted = [...items].sort((a, b) => times(a) - times(b));
  const median = times(sorted[Math.floor(sorted.length / 2)]);
  return { items, shortest: sorted[0], longest: sorted[sorted.length - 1], median };
}

// Layers differ by a few percent; a quarter is a different layer.
const ODD = 0.25;
const isOdd = (time, median) => Math.abs(time - median) > ODD * median;
