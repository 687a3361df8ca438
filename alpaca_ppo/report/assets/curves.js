// Charts of metrics, the legend of their lines, and the view that has all of them.

function metricChart(entry) {
  const series = seriesOf(entry.name);
  if (!series.length) return null;
  const [title, about] = titleOf(entry.name);
  const error = view.perSeed && series.some((s) => s.low) ? "band: standard error" : "";
  const note = [repeats(entry).trim(), about, error].filter(Boolean).join("; ");
  const shown = lines().flatMap(({ members }) => members);
  const best = shown.length === 1 ? RUNS[shown[0]].weights?.best ?? null : null;
  return fill(chart({ title, note, series, steps: shown.flatMap((i) => RUNS[i].steps), best }), { "data-metric": entry.name }, []);
}

// The KL of the same responses: an evaluation has its own.
function klBeside(name) {
  const parts = name.split("/");
  const own = [`${parts.slice(0, 2).join("/")}/kl_sum_seq`, "eval/kl_sum_seq"].find((kl) => METRICS.includes(kl));
  return parts[0] === "eval" && own || "objective/kl_sum_seq";
}

// A reward that was not trained on ("gold"), or the evaluation, against the distance from the reference.
function frontier() {
  if (!FRONTIERS.length) return null;
  const first = FRONTIERS.find((name) => name.includes("gold")) || FRONTIERS.find((name) => name === headline) || FRONTIERS[0];
  view.frontier ??= first;
  const place = el("div");
  const draw = (name) => {
    view.frontier = name;
    const series = lines().map(({ members, ...line }) => {
      const [ks, ys] = [klBeside(name), name].map((metric) => {
        const { x, y } = meanSeries(members.map((i) => points(RUNS[i], metric)));
        return new Map(x.map((step, k) => [step, y[k]]));
      });
      const steps = [...ys.keys()].filter((step) => ks.has(step));
      return { ...line, x: smoothed(steps.map((step) => ks.get(step)), view.smooth), y: smoothed(steps.map((step) => ys.get(step)), view.smooth), steps };
    }).filter((s) => s.x.length);
    place.replaceChildren(chart({ title: null, about: `${titleOf(name)[0]} against KL`, series, xLabel: "KL to the reference (nats)", points: true }));
  };
  draw(view.frontier);
  return el("div", { class: "frontier", "data-frontier": first },
    el("label", {}, el("select", { "aria-label": "Reward against KL", onchange: (event) => draw(event.target.value) },
      FRONTIERS.map((name) => el("option", { value: name, selected: name === view.frontier }, titleOf(name)[0]))), el("b", {}, " against KL"),
    view.smooth > 1 ? el("span", { class: "faint" }, ` means of ${view.smooth} points`) : ""), place);
}

// What the lines are, where they are not the runs at the top of the page.
function legendOfLines() {
  if (view.perSeed) return "";
  return el("div", { class: "lines", role: "group", "aria-label": "Lines" }, lines().map(({ name, members, colour, dash }) =>
    el("span", { class: "line-name" }, swatch(colour, dash, members.length > 1), ` ${name}`, members.length > 1 ? el("span", { class: "faint" }, " band: one standard deviation") : "")));
}

// The essentials, of which the chart of reward against KL is the last.
function essentialCharts() {
  return el("div", { class: "charts essential" }, among(ESSENTIAL).map(metricChart), frontier());
}

// A group of charts that is drawn when it is opened, and stays open.
function chartGroup(label, names, opened = false) {
  const entries = among(names);
  if (!entries.length) return "";
  const grid = el("div", { class: "charts" });
  const draw = () => { if (!grid.childElementCount) grid.append(...entries.map(metricChart).filter(Boolean)); };
  const open = opened || view.open.has(label);
  if (open) draw();
  return el("details", { open, "data-group": label, ontoggle: (event) => {
    if (event.target.open) { view.open.add(label); draw(); } else view.open.delete(label);
  } }, el("summary", {}, `${label} (${entries.length})`), grid);
}

function curveControls(redraw) {
  return el("div", { class: "controls" },
    hasSeeds() ? choice("Runs", [["seeds", "Mean and spread over seeds"], ["runs", "Each run"]], view.perSeed ? "runs" : "seeds",
      (value) => { view.perSeed = value === "runs"; drawRuns(); redraw(); }) : "",
    choice("Smoothing", [["1", "None"], ["5", "5 steps"], ["20", "20 steps"]], String(view.smooth), (value) => { view.smooth = Number(value); redraw(); }));
}

// The metrics that are in no group of their own, by the beginning of their names.
function byPrefix() {
  const grouped = new Set([...ESSENTIAL, ...GROUPS.flatMap(([, names]) => names)]), prefixes = new Map();
  for (const name of METRICS.filter((metric) => !grouped.has(metric))) {
    const prefix = name.split("/").slice(0, name.startsWith("ppo/") ? 2 : 1).join("/");
    prefixes.set(prefix, [...(prefixes.get(prefix) || []), name]);
  }
  return [...prefixes];
}

const allHidden = () => el("p", { class: "empty" }, "Every run is hidden; click one at the top to show it.");

function curvesView() {
  const charts = el("div"), root = el("section", { id: "curves-view" });
  const draw = () => {
    const matches = (name) => [name, titleOf(name)[0]].some((text) => text.toLowerCase().includes(view.search));
    const found = DISTINCT.filter(({ name, also }) => [name, ...also].some(matches));
    if (!view.search) charts.replaceChildren(...[legendOfLines(), essentialCharts(), ...[...GROUPS, ...byPrefix()].map(([label, names]) => chartGroup(label, names))].filter(Boolean));
    else charts.replaceChildren(...[legendOfLines(), found.length ? el("div", { class: "charts" }, found.map(metricChart)) : el("p", { class: "empty" }, "No metric has this in its name.")].filter(Boolean));
  };
  draw();
  root.append(
    el("div", { class: "controls" }, el("input", {
      type: "search", placeholder: "Search metrics", "aria-label": "Search metrics", value: view.search,
      oninput: (event) => { view.search = event.target.value.trim().toLowerCase(); draw(); },
    }), curveControls(draw)), charts);
  return root;
}
