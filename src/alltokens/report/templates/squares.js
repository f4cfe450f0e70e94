// Drawings of one value for each square of a grid: the pointer reads it. Their data are JSON:
// {rows, columns, values, told: {before, after, scale, digits}}.

for (const box of document.querySelectorAll(".squares")) {
  const { rows, columns, values, told } = JSON.parse(box.querySelector("script").textContent);
  box.addEventListener("pointermove", (event) => {
    const area = box.getBoundingClientRect();
    const column = Math.min(columns - 1, Math.floor(((event.clientX - area.left) / area.width) * columns));
    const row = Math.min(rows - 1, Math.floor(((event.clientY - area.top) / area.height) * rows));
    const value = values[row * columns + column];
    if (value === undefined) return tip.hide();
    tip.show(event.clientX, event.clientY, told.before + (told.scale * value).toFixed(told.digits) + told.after);
  });
  box.addEventListener("pointerleave", () => tip.hide());
}
