// Curves: hovering (or the arrow keys) reads values, dragging across zooms, a double click or Escape goes back.
// <figure class="chart"> holds its data as JSON: {title, x, unit, lines: [{name, series, x, y, spread, n}]}, and if wanted
// limits: [low, high]; whole: x is counted, not measured; apart: lines may lie on one another and are to stay visible.

const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];

function drawn(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Round numbers that cut [low, high] into about `wanted` parts.
function ticks(low, high, wanted, least = 0) {
  const rough = (high - low || 1) / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(least, [1, 2, 5, 10].find((times) => times * power >= rough * 0.999) * power);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step);
  return { found, step };
}

function numberText(value, step) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3 || size >= 1e6) return value.toExponential(step === undefined ? 2 : Math.max(0, Math.min(2, Math.ceil(Math.log10(size / step) - 1e-9))));
  if (step !== undefined) return value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  return size >= 1000 ? Math.round(value).toLocaleString("en") : value.toPrecision(4);
}

class Chart {
  constructor(figure) {
    this.data = JSON.parse(figure.querySelector("script").textContent);
    this.hidden = new Set();
    this.range = this.whole = this.bounds();
    this.at = null;
    this.plot = element("div", { className: "plot", tabIndex: 0, role: "application", ariaLabel: `${this.data.title}: values by arrow keys` });
    const reset = element("button", { type: "button", className: "quiet reset", hidden: true }, "Whole");
    reset.addEventListener("click", () => this.zoom(...this.whole));
    this.reset = reset;
    figure.append(element("figcaption", {}, element("span", {}, this.data.title), reset), this.plot);
    if (this.data.lines.length > 1) figure.append(this.legend());
    this.plot.addEventListener("pointermove", (event) => this.move(event));
    this.plot.addEventListener("pointerdown", (event) => this.press(event));
    this.plot.addEventListener("pointerup", (event) => this.release(event));
    this.plot.addEventListener("pointerleave", () => this.leave());
    this.plot.addEventListener("pointercancel", () => this.leave());
    this.plot.addEventListener("blur", () => this.leave());
    this.plot.addEventListener("dblclick", () => this.zoom(...this.whole));
    this.plot.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.plot);
    this.draw();
  }

  bounds() {
    const all = this.data.lines.flatMap((line) => line.x);
    return [Math.min(...all), Math.max(...all)];
  }

  get lines() {
    return this.data.lines.filter((line) => !this.hidden.has(line));
  }

  legend() {
    return element("div", { className: "legend" }, ...this.data.lines.map((line) => {
      const swatch = drawn("svg", { width: 22, height: 10, "aria-hidden": "true" },
        drawn("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: this.colour(line), "stroke-width": 2.5, "stroke-dasharray": this.dash(line) }));
      const button = element("button", { type: "button", ariaPressed: "true", title: "Show or hide" }, swatch, element("span", { className: "name" }, line.name));
      button.addEventListener("click", () => {
        if (!this.hidden.delete(line)) this.hidden.add(line);
        button.ariaPressed = String(!this.hidden.has(line));
        this.draw();
      });
      return button;
    }));
  }

  colour(line) {
    return `var(--series-${line.series % 6})`;
  }

  dash(line) {
    if (this.data.apart) return ["", "9 5", "2 4", "12 4 2 4", "6 3"][line.series % 5];
    return DASHES[Math.floor(line.series / 6) % DASHES.length];
  }

  // Each later line is thinner than those that it may lie on.
  width(line) {
    return this.data.apart ? Math.max(2, 4.5 - line.series) : 2;
  }

  // The values that are seen, and a little air.
  heights() {
    if (this.data.limits) return this.data.limits;
    const [left, right] = this.range, seen = [];
    for (const line of this.lines) {
      line.x.forEach((x, index) => {
        const spread = line.spread?.[index] ?? 0;
        if (x >= left && x <= right && line.y[index] !== null) seen.push(line.y[index] - spread, line.y[index] + spread);
      });
    }
    if (!seen.length) return [0, 1];
    const low = Math.min(...seen), high = Math.max(...seen), air = 0.06 * (high - low) || Math.abs(high) * 0.1 || 0.5;
    return [low >= 0 ? Math.max(0, low - air) : low - air, high + air];
  }

  draw() {
    const width = Math.max(200, this.plot.clientWidth), height = Math.round(Math.min(260, Math.max(170, width * 0.5)));
    const [low, high] = this.heights(), [first, last] = this.range;
    const down = ticks(low, high, 4), across = ticks(first, last, Math.max(2, width / 90), this.data.whole ? 1 : 0);
    const labels = down.found.map((value) => numberText(value, down.step) + (this.data.unit ?? ""));
    const area = { left: 14 + 6.6 * Math.max(...labels.map((text) => text.length), 1), top: 8, right: width - 10, bottom: height - 36 };
    this.area = area;
    this.toX = (x) => area.left + ((x - first) / (last - first || 1)) * (area.right - area.left);
    this.toY = (y) => area.bottom - ((y - low) / (high - low || 1)) * (area.bottom - area.top);
    const clip = `clip-${(Chart.count = (Chart.count ?? 0) + 1)}`;
    const svg = drawn("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": this.data.title });
    svg.append(drawn("clipPath", { id: clip }, drawn("rect", { x: area.left, y: area.top - 4, width: area.right - area.left, height: area.bottom - area.top + 8 })));
    down.found.forEach((value, index) => {
      const y = this.toY(value);
      svg.append(drawn("line", { class: "grid", x1: area.left, x2: area.right, y1: y, y2: y }),
        drawn("text", { x: area.left - 6, y: y + 4, "text-anchor": "end" }, labels[index]));
    });
    for (const value of across.found) {
      svg.append(drawn("text", { x: this.toX(value), y: area.bottom + 16, "text-anchor": "middle" }, numberText(value, across.step)));
    }
    svg.append(drawn("line", { class: "axis", x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom }),
      drawn("text", { class: "axis-name", x: area.right, y: area.bottom + 31, "text-anchor": "end" }, this.data.x));
    const inside = drawn("g", { "clip-path": `url(#${clip})` });
    for (const line of this.lines) {
      if (line.spread) inside.append(this.band(line));
      inside.append(drawn("path", { d: this.path(line), fill: "none", stroke: this.colour(line), "stroke-width": this.width(line), "stroke-linejoin": "round", "stroke-dasharray": this.dash(line) }));
      if (line.x.length === 1) inside.append(drawn("circle", { cx: this.toX(line.x[0]), cy: this.toY(line.y[0]), r: 3, fill: this.colour(line) }));
    }
    this.marks = drawn("g", { class: "marks" });
    this.choice = drawn("rect", { class: "choice", y: area.top, height: area.bottom - area.top, width: 0 });
    svg.append(inside, this.choice, this.marks);
    this.plot.replaceChildren(svg);
  }

  path(line) {
    let text = "", pen = "M";
    line.x.forEach((x, index) => {
      if (line.y[index] === null) return (pen = "M");
      text += `${pen}${this.toX(x).toFixed(1)} ${this.toY(line.y[index]).toFixed(1)}`;
      pen = "L";
    });
    return text;
  }

  band(line) {
    const edge = (sign) => line.x.map((x, index) => `${this.toX(x).toFixed(1)} ${this.toY(line.y[index] + sign * line.spread[index]).toFixed(1)}`);
    return drawn("path", { d: `M${edge(1).join("L")}L${edge(-1).reverse().join("L")}Z`, fill: this.colour(line), opacity: 0.2 });
  }

  // The value of x that lies nearest to a place, among the points of all lines in sight.
  nearest(place) {
    let best = null;
    for (const line of this.lines) for (const x of line.x) {
      if (x < this.range[0] || x > this.range[1]) continue;
      if (best === null || Math.abs(this.toX(x) - place) < Math.abs(this.toX(best) - place)) best = x;
    }
    return best;
  }

  say(x, clientY) {
    this.at = x;
    if (x === null) return this.leave();
    const rows = [];
    this.marks.replaceChildren(drawn("line", { x1: this.toX(x), x2: this.toX(x), y1: this.area.top, y2: this.area.bottom }));
    for (const line of this.lines) {
      // Lines need not have the same points: each tells its own nearest one, if it is near.
      const index = line.x.reduce((best, value, at) => (Math.abs(value - x) < Math.abs(line.x[best] - x) ? at : best), 0);
      if (Math.abs(this.toX(line.x[index]) - this.toX(x)) > 12 || line.y[index] === null) continue;
      this.marks.append(drawn("circle", { cx: this.toX(line.x[index]), cy: this.toY(line.y[index]), r: 4, fill: this.colour(line) }));
      const swatch = element("span", { className: "swatch" });
      swatch.style.setProperty("--colour", this.colour(line));
      const spread = line.spread ? ` \u00b1 ${numberText(line.spread[index])}` : "";
      rows.push(element("tr", {}, element("td", {}, swatch, element("span", { className: "name" }, line.name)),
        element("td", {}, numberText(line.y[index]) + spread + (this.data.unit ?? ""))));
    }
    const box = this.plot.getBoundingClientRect();
    tip.show(box.left + this.toX(x), clientY ?? box.top + 20, element("div", {}, `${this.data.x} ${numberText(Math.round(x * 1000) / 1000)}`),
      element("table", {}, element("tbody", {}, ...rows)));
  }

  placeOf(event) {
    return event.clientX - this.plot.getBoundingClientRect().left;
  }

  press(event) {
    if (event.button === 0 && event.pointerType !== "touch") this.start = this.placeOf(event);
    this.say(this.nearest(this.placeOf(event)), event.clientY);
  }

  move(event) {
    const place = this.placeOf(event);
    if (this.start === undefined) return this.say(this.nearest(place), event.clientY);
    const [from, to] = [Math.max(this.area.left, Math.min(this.start, place)), Math.min(this.area.right, Math.max(this.start, place))];
    this.choice.setAttribute("x", from);
    this.choice.setAttribute("width", Math.max(0, to - from));
  }

  release(event) {
    const start = this.start, end = this.placeOf(event);
    this.start = undefined;
    if (start === undefined || Math.abs(end - start) < 8) return this.choice.setAttribute("width", 0);
    const back = (place) => this.range[0] + ((place - this.area.left) / (this.area.right - this.area.left)) * (this.range[1] - this.range[0]);
    this.zoom(...[back(start), back(end)].sort((a, b) => a - b));
  }

  zoom(from, to) {
    this.range = [Math.max(from, this.whole[0]), Math.min(to, this.whole[1])];
    this.reset.hidden = this.range[0] === this.whole[0] && this.range[1] === this.whole[1];
    tip.hide();
    this.draw();
  }

  key(event) {
    const points = [...new Set(this.lines.flatMap((line) => line.x))].filter((x) => x >= this.range[0] && x <= this.range[1]).sort((a, b) => a - b);
    const index = this.at === null ? Math.floor(points.length / 2) : points.indexOf(this.at);
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step !== undefined && points.length) {
      event.preventDefault();
      this.say(points[Math.max(0, Math.min(points.length - 1, this.at === null ? index : index + step))]);
      this.plot.ariaLabel = tip.box.innerText.replace(/\s+/g, " ");
    } else if (event.key === "Escape") this.zoom(...this.whole);
    else if (event.key === "+" || event.key === "-") {
      const middle = this.at ?? (this.range[0] + this.range[1]) / 2, half = ((this.range[1] - this.range[0]) / 2) * (event.key === "+" ? 0.5 : 2);
      this.zoom(middle - half, middle + half);
    }
  }

  leave() {
    this.start = undefined;
    this.at = null;
    this.choice?.setAttribute("width", 0);
    this.marks?.replaceChildren();
    tip.hide();
  }
}

const charts = [...document.querySelectorAll("figure.chart")].map((figure) => new Chart(figure));
