// Shared by all pages: making elements, the tip beside the pointer, light and dark, sortable tables.
// Names of users only ever become text, never markup.

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in made && name !== "list") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function embedded(id) {
  return JSON.parse(document.getElementById(id).textContent);
}

function percent(share, digits = 1) {
  return (100 * share).toFixed(digits) + "\u202f%";
}

const tip = {
  box: document.getElementById("tip"),
  show(x, y, ...content) {
    this.box.replaceChildren(...content);
    this.box.hidden = false;
    const { width, height } = this.box.getBoundingClientRect();
    const left = x + 14 + width > innerWidth - 8 ? Math.max(8, x - width - 14) : x + 14;
    const top = y + 14 + height > innerHeight - 8 ? Math.max(8, y - height - 14) : y + 14;
    this.box.style.left = left + "px";
    this.box.style.top = top + "px";
  },
  hide() {
    this.box.hidden = true;
  },
};
addEventListener("scroll", () => tip.hide(), { passive: true });
addEventListener("keydown", (event) => event.key === "Escape" && tip.hide());

{
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const name = () => (button.textContent = isDark() ? "Light" : "Dark");
  button.hidden = false;
  button.title = "Switch between light and dark";
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    name();
    dispatchEvent(new Event("themechange"));
  });
  system.addEventListener("change", name);
  name();
}

// Tables with class "sortable": a click on a head sorts by it, numbers (data-value) as numbers.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = element("button", { type: "button" }, ...head.childNodes);
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const falling = head.getAttribute("aria-sort") !== "descending" && head.classList.contains("number")
        ? true
        : head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
      const rows = [...table.tBodies[0].rows].sort((a, b) => compared(value(a), value(b)) * (falling ? -1 : 1));
      table.tBodies[0].append(...rows);
    });
  });
}

function compared(a, b) {
  const [x, y] = [parseFloat(a), parseFloat(b)];
  if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) && Number.isNaN(y) ? a.localeCompare(b) : Number.isNaN(x) ? -1 : 1;
  return x - y;
}
