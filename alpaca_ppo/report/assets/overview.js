// The first view: what the doctor has found, the metrics at the start and at the end, and the curves that matter.

// "0.2 → 0.6", or of several runs "0.2 → 0.6 ± 0.1": the ends that the console and the model card have too.
function startAndEnd({ members }, name) {
  const all = members.map((i) => RUNS[i].ends[name]).filter(Boolean);
  if (!all.length) return "–";
  const ends = all.map(([, last]) => last), end = meanOf(ends);
  const last = `${short(end)}${ends.length > 1 ? ` ± ${short(deviation(ends, end))}` : ""}`;
  return all.every(([, , measured]) => measured === 1) ? last : `${short(meanOf(all.map(([first]) => first)))} → ${last}`;
}

// What the two ends are, such as "means of the first and the last 3 steps, before the last update".
function endsAre() {
  const rules = [...new Set(RUNS.map((run) => run.ends_are))];
  const text = rules.length === 1 ? rules[0] : "means of the first and the last tenth of each run's steps, ten at most, before the last update";
  return text ? el("p", { class: "faint" }, `${text[0].toUpperCase()}${text.slice(1)}; of evaluations the first and the last.`) : "";
}

// Which step the models in final/ are from, and whether the policy was better before training.
function finalWeights() {
  return RUNS.filter((run) => run.weights).map((run) => el("p", { class: "weights" }, el("b", {}, "final/"), `${RUNS.length > 1 ? ` of ${run.name}` : ""}: ${run.weights.text}`,
    run.weights.best !== null && RUNS.length === 1 ? el("span", { class: "faint" }, " (the dashed line in the curves)") : "", run.weights.before ? el("strong", { class: "worse" }, `; ${run.weights.before}`) : ""));
}

// Tiles for one line, a table for several.
function endsTable(entries) {
  const columns = lines().filter(({ members }) => members.length);
  const names = entries.map((entry) => [entry.name, titleOf(entry.name)[0] + repeats(entry)]);
  if (columns.length === 1) {
    return el("dl", { class: "tiles" }, names.map(([name, title]) => el("div", { "data-metric": name, title: name }, el("dt", {}, title), el("dd", {}, startAndEnd(columns[0], name)))));
  }
  return el("div", { class: "scroll" }, el("table", { class: "plain ends" },
    el("thead", {}, el("tr", {}, el("th", {}, "Metric"), columns.map(({ name, colour, dash, members }) => el("th", {}, swatch(colour, dash, members.length > 1), ` ${name}`)))),
    el("tbody", {}, names.map(([name, title]) => el("tr", { "data-metric": name }, el("th", { title: name }, title), columns.map((line) => el("td", {}, startAndEnd(line, name))))))));
}

function overview() {
  const ends = el("div", { id: "ends" }), charts = el("div");
  const more = GROUPS.filter(([label]) => label !== "Optimization").flatMap(([, names]) => names);
  const draw = () => {
    const rest = among(more);
    ends.replaceChildren(endsTable(among(ESSENTIAL)), rest.length ? el("details", { open: view.open.has("ends"), ontoggle: (event) => {
      if (event.target.open) view.open.add("ends"); else view.open.delete("ends");
    } }, el("summary", {}, `More evaluations and rewards (${rest.length})`), endsTable(rest)) : "");
    charts.replaceChildren(...[legendOfLines(), essentialCharts(), ...GROUPS.map(([label, names]) => chartGroup(label, names))].filter(Boolean));
  };
  draw();
  const steps = Math.max(0, ...RUNS.map((run) => run.steps.length));
  return el("section", { id: "overview-view" },
    DATA.left_out.length ? el("details", { class: "notice" }, el("summary", {}, "Not everything is in this file"), DATA.left_out.map((text) => el("p", {}, text))) : "",
    findings(),
    METRICS.length && steps ? [el("h2", {}, "From start to end"), endsAre(), ends, ...finalWeights(), el("h2", {}, "Curves"), curveControls(draw), charts]
      : el("p", { class: "empty" }, "No metrics yet: metrics.jsonl gets its first line when the first step, or the evaluation before training, has ended."));
}

const SIGNS = { error: "✖ error", warning: "▲ warning" };

// The text with its addresses as links, and its pages of the documentation where the report knows their address.
function linked(text) {
  return text.split(/(https?:\/\/[^\s;,)]*[^\s;,.)]|docs\/[\w/-]+\.md(?:#[\w-]+)?)/).map((part, n) => {
    const href = n % 2 === 0 ? null : part.startsWith("http") ? part : DATA.pages && DATA.pages + part;
    return href ? el("a", { href }, part) : part;
  });
}

function findings() {
  const all = RUNS.flatMap((run, i) => (view.hidden.has(i) ? [] : run.findings.map((finding) => ({ run, finding }))));
  const order = Object.keys(SIGNS);
  all.sort((a, b) => order.indexOf(a.finding.severity) - order.indexOf(b.finding.severity));
  return el("div", { id: "findings" }, el("h2", {}, "Findings"),
    all.length ? all.map(({ run, finding }) => el("details", { class: `finding ${finding.severity}`, open: true },
      el("summary", {}, el("span", { class: "sign" }, SIGNS[finding.severity]), " ", linked(finding.sentence),
        el("span", { class: "where" }, ` step ${exact(finding.step)}${RUNS.length > 1 ? `, ${run.name}` : ""}`)),
      el("p", {}, el("b", {}, "Remedy: "), linked(finding.remedy))))
      : el("p", { class: "empty" }, "No findings."));
}
