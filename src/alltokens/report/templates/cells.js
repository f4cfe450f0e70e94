// A picture under the cells of its label map: hovering, or the arrow keys, say a cell's classes and probabilities.
// A map is what a store holds: class ids, half-precision scores, and the log-sum-exp of the classes left out (tail).

const PALETTE = [[0, 114, 178], [230, 159, 0], [0, 158, 115], [204, 121, 167], [213, 94, 0], [240, 228, 66], [86, 180, 233]];
const OTHERS = [150, 150, 150];

function bytesOf(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

function halves(text) {
  const bits = new Uint16Array(bytesOf(text).buffer);
  return Float32Array.from(bits, (half) => {
    const sign = half & 0x8000 ? -1 : 1, exponent = (half >> 10) & 31, fraction = half & 1023;
    if (exponent === 0) return sign * fraction * 2 ** -24;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  });
}

// -> kept, rows, columns, ids and probabilities (kept x cells), mass (cells) of the kept classes
function decodeMap(coded) {
  const bytes = bytesOf(coded.ids).buffer;
  const ids = coded.wide ? new Uint32Array(bytes) : new Uint16Array(bytes);
  const scores = halves(coded.scores), tail = coded.tail === null ? null : halves(coded.tail);
  const cells = coded.rows * coded.columns, probabilities = new Float32Array(scores.length);
  for (let cell = 0; cell < cells; cell++) {
    let highest = tail === null ? -Infinity : tail[cell];
    for (let at = cell; at < scores.length; at += cells) highest = Math.max(highest, scores[at]);
    let total = tail === null ? 0 : Math.exp(tail[cell] - highest);
    for (let at = cell; at < scores.length; at += cells) total += probabilities[at] = Math.exp(scores[at] - highest);
    for (let at = cell; at < scores.length; at += cells) probabilities[at] /= total;
  }
  return { ...coded, cells, ids, scores, probabilities };
}

// The classes that are first in some cell, the one with the most cells first: [{id, cells}]
function firstClasses(map) {
  const counts = new Map();
  for (let cell = 0; cell < map.cells; cell++) {
    const id = map.ids[cell + map.cells * strongest(map, cell)];
    counts.set(id, (counts.get(id) ?? 0) + 1);
  }
  return [...counts].map(([id, cells]) => ({ id, cells })).sort((a, b) => b.cells - a.cells || a.id - b.id);
}

function strongest(map, cell) {
  let best = 0;
  for (let kept = 1; kept < map.kept; kept++) {
    if (map.probabilities[kept * map.cells + cell] > map.probabilities[best * map.cells + cell]) best = kept;
  }
  return best;
}

function probabilityOf(map, cell, id) {
  for (let at = cell; at < map.ids.length; at += map.cells) if (map.ids[at] === id) return map.probabilities[at];
  return 0;
}

class Cells {
  // `coded` is decoded when it is first drawn. `names` are the classes' names. `palette` are the ids that have a
  // colour, in the order of the colours: those of most cells first, unless somebody says otherwise.
  constructor(box, coded, names) {
    Object.assign(this, { box, coded, names, map: null, cell: null, palette: null });
    this.canvas = element("canvas", { ariaHidden: "true" });
    this.cursor = element("div", { className: "cursor" });
    box.append(this.canvas, this.cursor);
    box.tabIndex = 0;
    box.setAttribute("role", "application");
    box.setAttribute("aria-roledescription", "label map");
    box.addEventListener("pointermove", (event) => this.pointAt(event));
    box.addEventListener("pointerdown", (event) => this.pointAt(event));
    box.addEventListener("pointerleave", () => this.leave());
    box.addEventListener("blur", () => this.leave());
    box.addEventListener("keydown", (event) => this.move(event));
  }

  ready() {
    if (this.map === null) {
      this.map = decodeMap(this.coded);
      this.order = firstClasses(this.map);
      this.palette ??= this.order.map(({ id }) => id);
      [this.canvas.width, this.canvas.height] = [this.map.columns, this.map.rows];
    }
    return this.map;
  }

  colourOf(id) {
    const rank = this.palette.indexOf(id);
    return rank >= 0 && rank < PALETTE.length ? PALETTE[rank] : OTHERS;
  }

  // show: "classes" colours each cell by its first class, "none" nothing, a number is a class whose heat is wanted
  draw(show, strength = 0.7) {
    const map = this.ready(), context = this.canvas.getContext("2d");
    const image = context.createImageData(map.columns, map.rows);
    for (let cell = 0; cell < map.cells && show !== "none"; cell++) {
      let colour, alpha;
      if (show === "classes") {
        const best = strongest(map, cell) * map.cells + cell;
        colour = this.colourOf(map.ids[best]);
        alpha = strength * (0.25 + 0.75 * map.probabilities[best]);
      } else {
        // From a dark veil where the class is not to bright orange where it surely is.
        const heat = probabilityOf(map, cell, show);
        colour = [10 + 245 * heat, 12 + 160 * heat, 24 - 24 * heat];
        alpha = strength * (1.1 - 0.35 * heat);
      }
      image.data.set([...colour, 255 * Math.min(1, alpha)], 4 * cell);
    }
    context.putImageData(image, 0, 0);
  }

  pointAt(event) {
    const area = this.box.getBoundingClientRect(), map = this.ready();
    const column = Math.floor(((event.clientX - area.left) / area.width) * map.columns);
    const row = Math.floor(((event.clientY - area.top) / area.height) * map.rows);
    if (column < 0 || row < 0 || column >= map.columns || row >= map.rows) return this.leave();
    this.say(row * map.columns + column, event.clientX, event.clientY);
  }

  move(event) {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const map = this.ready();
    const clamp = (value, size) => Math.max(0, Math.min(size - 1, value));
    let row = Math.floor(map.rows / 2), column = Math.floor(map.columns / 2);
    if (this.cell !== null) {
      row = clamp(Math.floor(this.cell / map.columns) + step[0], map.rows);
      column = clamp((this.cell % map.columns) + step[1], map.columns);
    }
    const area = this.box.getBoundingClientRect();
    const x = area.left + ((column + 1) / map.columns) * area.width, y = area.top + ((row + 1) / map.rows) * area.height;
    this.say(row * map.columns + column, x, y);
    this.box.ariaLabel = tip.box.innerText.replace(/\s+/g, " ");
  }

  say(cell, x, y) {
    const map = this.map;
    this.cell = cell;
    const kept = [...Array(map.kept).keys()].map((at) => at * map.cells + cell);
    kept.sort((a, b) => map.probabilities[b] - map.probabilities[a]);
    const rows = kept.filter((at) => map.probabilities[at] > 0).map((at) =>
      element("tr", {}, element("td", { className: "name" }, this.names[map.ids[at]] ?? String(map.ids[at])),
        element("td", {}, map.scores[at].toFixed(2)), element("td", {}, percent(map.probabilities[at]))));
    if (map.tail !== null) {
      const rest = 1 - kept.reduce((sum, at) => sum + map.probabilities[at], 0);
      rows.push(element("tr", {}, element("td", {}, "all others"), element("td"), element("td", {}, percent(Math.max(0, rest)))));
    }
    tip.show(x, y, element("table", {}, element("tbody", {}, ...rows)));
    const style = this.cursor.style, percentOf = (value, of) => (100 * value) / of + "%";
    [style.width, style.height] = [percentOf(1, map.columns), percentOf(1, map.rows)];
    [style.left, style.top] = [percentOf(cell % map.columns, map.columns), percentOf(Math.floor(cell / map.columns), map.rows)];
    this.box.classList.add("pointed");
  }

  leave() {
    this.cell = null;
    this.box.classList.remove("pointed");
    tip.hide();
  }
}
