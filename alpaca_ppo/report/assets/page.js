// The frame of the page: views, runs, theme, keys.

const main = document.getElementById("main");
const VIEWS = [["overview", "Overview", overview], ["curves", "Curves", curvesView], ["answers", "Answers", null], ["configuration", "Configuration", configuration]];
const nav = document.getElementById("views");
let current = null;

function show() {
  const [name, answer] = location.hash.slice(1).split("/");
  const chosen = VIEWS.find(([key]) => key === name) || VIEWS[0];
  hideTip();
  const opened = /^\d+$/.test(answer || "") ? Number(answer) : null;
  current = chosen[0] === "configuration" ? configuration() : view.hidden.size === RUNS.length ? allHidden() : chosen[0] === "answers" ? answersView(opened !== null && opened < NUM_ANSWERS ? opened : null) : chosen[2]();
  main.replaceChildren(current);
  for (const link of nav.children) {
    if (link.dataset.view === chosen[0]) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

for (const [key, label] of VIEWS) nav.append(el("a", { href: `#${key}`, "data-view": key }, key === "answers" ? `${label} (${NUM_ANSWERS})` : label));

// The runs, which a click hides or shows; in the colours of the lines that they are part of.
function drawRuns() {
  const buttons = RUNS.map((run, i) => {
    const of = view.perSeed ? i : run.group;
    const state = run.last_step || run.steps.length ? `step ${run.last_step}${run.finished ? ", finished" : ""}` : "no step yet";
    return el("button", { type: "button", class: "run", "aria-pressed": String(!view.hidden.has(i)), title: `${run.path}: ${state}${RUNS.length > 1 ? "; click to hide or show" : ""}`, onclick: () => {
      if (RUNS.length === 1) return;
      if (view.hidden.has(i)) view.hidden.delete(i); else view.hidden.add(i);
      drawRuns();
      show();
    } }, swatch(runColour(of), runDash(of)), ` ${run.name} `, el("span", { class: "faint" }, state));
  });
  document.getElementById("runs").replaceChildren(...buttons, el("span", { class: "faint written" }, `written ${DATA.written}`));
}

const theme = document.getElementById("theme");
const THEMES = ["system", "light", "dark"];
theme.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme || "system") + 1) % 3];
  document.documentElement.dataset.theme = next;
  theme.textContent = `Theme: ${next}`;
});

addEventListener("hashchange", show);
// Chromium and Safari empty a search field on Escape with this event alone, without `input`.
addEventListener("search", (event) => event.target.dispatchEvent(new Event("input")));
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "/" && document.getElementById("search")) {
    event.preventDefault();
    document.getElementById("search").focus();
  }
  if (event.key === "n") current.move?.(1);
  if (event.key === "p") current.move?.(-1);
  if (event.key === "Escape") current.close?.();
  const column = COLUMNS[Number(event.key) - 1];
  if (column) document.querySelector(`#inspector [data-value="${column.key}"]:not(:disabled)`)?.click();
});
drawRuns();
show();
