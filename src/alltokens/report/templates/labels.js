// The page of a label store: cards of pictures, drawn when they come into sight; sorting, filters, a larger view.

const data = embedded("data");
const names = data.names;
const control = (id) => document.getElementById(id);
const state = { show: "classes", strength: 0.65, one: 0 };
const cards = data.pictures.map(makeCard);
let shown = [];

function colour(rgb) {
  return `rgb(${rgb.join(" ")})`;
}

function makeCard(entry) {
  const card = { entry, own: null, drawn: false };
  const image = element("img", { alt: "", src: entry.image, loading: "lazy", width: entry.width, height: entry.height });
  card.box = element("div", { className: "cells", ariaLabel: `${entry.key}: classes of its cells, by arrow keys` }, image);
  card.cells = new Cells(card.box, entry.map, names);
  card.chips = element("ul", { className: "chips", ariaLabel: "Classes of this map" });
  const larger = element("button", { type: "button", title: "Larger", ariaLabel: `Larger view of ${entry.key}` }, "⤢");
  larger.addEventListener("click", () => openLarge(card));
  const key = element("span", { title: entry.key }, element("bdi", {}, entry.key));
  card.root = element("article", { className: "card" }, card.box, element("p", { className: "key" }, key, larger), verdict(entry), card.chips);
  card.root.card = card;
  return card;
}

function verdict(entry) {
  const map = element("span", { className: "name" }, names[entry.guess]);
  const line = element("p", { className: "verdict" });
  if (entry.label === null || entry.label < 0) {
    line.append("map: ", map, ` ${percent(entry.guess_probability, 0)}`);
  } else if (entry.doubt > 0) {
    map.classList.add("differs");
    line.append(element("span", { className: "name" }, names[entry.label]), ` ${percent(entry.label_probability, 0)}, map: `, map,
      ` ${percent(entry.guess_probability, 0)}`);
  } else {
    line.append(element("span", { className: "name" }, names[entry.label]), ` ${percent(entry.label_probability, 0)}`);
  }
  return line;
}

function wanted(card) {
  if (card.own !== null) return card.own;
  if (state.show === "one") return state.one;
  if (state.show in card.entry) return card.entry[state.show] >= 0 ? card.entry[state.show] : "none";
  return state.show;
}

function draw(card) {
  if (!card.drawn) {
    card.drawn = true;
    card.cells.ready();
    fillChips(card, 4);
  }
  card.cells.draw(wanted(card), state.strength);
  for (const chip of card.chips.querySelectorAll("button")) chip.ariaPressed = String(Number(chip.dataset.id) === card.own);
}

function fillChips(card, most) {
  const { map, order } = card.cells;
  for (const { id, cells } of order.slice(0, most).filter((found, at) => at === 0 || found.cells >= 0.01 * map.cells)) {
    const swatch = element("span", { className: "swatch" });
    swatch.style.setProperty("--colour", colour(card.cells.colourOf(id)));
    const chip = element("button", { type: "button", ariaPressed: "false" }, swatch,
      element("span", { className: "name" }, names[id]), ` ${percent(cells / map.cells, 0)}`);
    chip.dataset.id = id;
    chip.title = "Share of cells where it comes first; press for its heat";
    chip.addEventListener("click", () => {
      card.own = card.own === id ? null : id;
      draw(card);
    });
    card.chips.append(element("li", {}, chip));
  }
}

// Only what is in sight, or nearly, is decoded and drawn.
const sight = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    target.card.visible = isIntersecting;
    if (isIntersecting) draw(target.card);
  }
}, { rootMargin: "400px" });
for (const card of cards) sight.observe(card.root);

function redraw() {
  for (const card of cards) if (card.visible) draw(card);
}

function arrange() {
  const order = control("sort").value, folder = control("folder").value, text = control("search").value.toLowerCase();
  const disagreeing = control("disagreeing")?.checked;
  const own = (entry) => (data.comparable ? entry.label : entry.guess);
  shown = cards.filter(({ entry }) =>
    (folder === "" || own(entry) === Number(folder)) && entry.key.toLowerCase().includes(text) && (!disagreeing || entry.doubt > 0));
  const byName = (a, b) => (a.entry.key < b.entry.key ? -1 : 1);
  const value = (card) => card.entry[order] ?? -Infinity;
  shown.sort(order === "key" ? byName : (a, b) => value(b) - value(a) || byName(a, b));
  control("cards").replaceChildren(...shown.map((card) => card.root));
  control("count").textContent = `${shown.length} of ${cards.length} pictures`;
}

function openLarge(card) {
  const at = shown.indexOf(card), { entry } = card, large = control("large");
  control("large-name").textContent = entry.key;
  const image = element("img", { alt: "", src: entry.image, width: entry.width, height: entry.height });
  const box = element("div", { className: "cells", ariaLabel: `${entry.key}: classes of its cells, by arrow keys` }, image);
  const cells = new Cells(box, entry.map, names);
  const map = cells.ready();
  let show = wanted(card);
  const bars = element("div", { className: "bars" });
  for (const { id, mean } of meanProbabilities(map).slice(0, 12)) {
    const bar = element("i");
    bar.style.width = 100 * mean + "%";
    bar.style.setProperty("--colour", colour(cells.colourOf(id)));
    const button = element("button", { type: "button", ariaPressed: "false" }, element("span", { className: "name" }, names[id]),
      element("span", {}, percent(mean)), bar);
    button.dataset.id = id;
    button.addEventListener("click", () => paint(show === id ? "classes" : id));
    bars.append(button);
  }
  const paint = (what) => {
    show = what;
    cells.draw(show, state.strength);
    for (const button of bars.children) button.ariaPressed = String(Number(button.dataset.id) === show);
  };
  const caption = element("p", { className: "small faint" }, "Probability averaged over the cells. Press a class for its heat.");
  control("large-body").replaceChildren(box, element("div", {}, verdict(entry), caption, bars));
  control("previous").onclick = () => openLarge(shown[(at + shown.length - 1) % shown.length]);
  control("next").onclick = () => openLarge(shown[(at + 1) % shown.length]);
  paint(show);
  if (!large.open) large.showModal();
}

function meanProbabilities(map) {
  const sums = new Map();
  map.ids.forEach((id, at) => sums.set(id, (sums.get(id) ?? 0) + map.probabilities[at] / map.cells));
  return [...sums].map(([id, mean]) => ({ id, mean })).sort((a, b) => b.mean - a.mean);
}

function fill(select, ids) {
  for (const id of [...new Set(ids)].filter((id) => id !== null && id >= 0).sort((a, b) => names[a].localeCompare(names[b])))
    select.append(element("option", { value: id }, names[id]));
}

fill(control("folder"), data.pictures.map((entry) => (data.comparable ? entry.label : entry.guess)));
fill(control("one"), data.pictures.flatMap((entry) => [entry.label, entry.guess, entry.runner_up]));
state.one = Number(control("one").value);
for (const id of ["sort", "folder", "search", "disagreeing"]) control(id)?.addEventListener("input", arrange);
control("show").addEventListener("input", () => {
  state.show = control("show").value;
  control("one-label").hidden = state.show !== "one";
  for (const card of cards) card.own = null;
  redraw();
});
control("one").addEventListener("input", () => {
  state.one = Number(control("one").value);
  redraw();
});
control("strength").addEventListener("input", () => {
  state.strength = control("strength").value / 100;
  redraw();
});
control("close").addEventListener("click", () => control("large").close());
control("large").addEventListener("keydown", (event) => {
  if (event.key === "ArrowLeft") control("previous").click();
  if (event.key === "ArrowRight") control("next").click();
});
addEventListener("beforeprint", () => shown.forEach(draw));
arrange();
