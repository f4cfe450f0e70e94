// The report: curves (charts.js), label maps and token predictions under the pointer (cells.js), values of squares (squares.js).

const overlays = [...document.querySelectorAll(".cells[data-map]")].map((box) => {
  const { map, names } = JSON.parse(box.querySelector("script").textContent);
  const cells = new Cells(box, map, names);
  cells.ready();
  return cells;
});

// One colour for one class in the maps that lie beside each other.
for (const beside of document.querySelectorAll(".overlay")) {
  const inside = overlays.filter((cells) => beside.contains(cells.box));
  const palette = [...new Set(inside.flatMap((cells) => cells.order.slice(0, 4)).map(({ id }) => id))];
  for (const cells of inside) cells.palette = palette;
}

for (const cells of overlays) {
  const { box, names } = cells;
  cells.draw("classes", 0.65);
  const chips = element("ul", { className: "chips" });
  for (const { id, cells: count } of cells.order.slice(0, 4)) {
    const swatch = element("span", { className: "swatch" });
    swatch.style.setProperty("--colour", `rgb(${cells.colourOf(id).join(" ")})`);
    const chip = element("button", { type: "button", ariaPressed: "false", title: "Share of cells where it comes first; press for its heat" },
      swatch, element("span", { className: "name" }, names[id] ?? String(id)), ` ${percent(count / cells.map.cells, 0)}`);
    chip.addEventListener("click", () => {
      const on = chip.ariaPressed !== "true";
      for (const other of chips.querySelectorAll("button")) other.ariaPressed = "false";
      chip.ariaPressed = String(on);
      cells.draw(on ? id : "classes", 0.65);
    });
    chips.append(element("li", {}, chip));
  }
  (box.parentElement.querySelector("figcaption") ?? box).after(chips);
}

for (const cell of document.querySelectorAll("[data-tip]")) {
  cell.addEventListener("pointermove", (event) => tip.show(event.clientX, event.clientY, cell.dataset.tip));
  cell.addEventListener("pointerleave", () => tip.hide());
}
