// Options and provenance: where the runs differ, and everything of each.

// A value as people write it: lists with commas, the rest as JSON.
function written(value) {
  if (value === undefined) return "–";
  if (Array.isArray(value) && value.length && value.every((entry) => typeof entry !== "object")) return value.join(", ");
  return typeof value === "string" ? value : JSON.stringify(value);
}

// Nested mappings as one, with names such as `versions.torch`.
function flat(mapping, prefix = "") {
  return Object.entries(mapping || {}).flatMap(([name, value]) => (value && typeof value === "object" && !Array.isArray(value)
    ? Object.keys(value).length ? flat(value, `${prefix}${name}.`) : [] : [[prefix + name, value]]));
}

function commit(git) {
  return git ? `${String(git.commit).slice(0, 10)}${git.branch ? ` (${git.branch})` : ""}${git.dirty ? ", with uncommitted changes" : ""}` : undefined;
}

// What people compare of where runs come from; the rest is folded.
const ORIGINS = [
  ["Preset", (p) => (p.presets?.length ? p.presets : undefined)],
  ["Configuration files", (p) => (p.config_files?.length ? p.config_files : undefined)],
  ["Git commit", (p) => commit(p.git)],
  ["alpaca_ppo", (p) => p.versions?.alpaca_ppo],
  ["torch", (p) => p.versions?.torch],
  ["transformers", (p) => p.versions?.transformers],
  ["Processes", (p) => p.hardware && `${p.hardware.processes} on ${p.hardware.device}${p.hardware.zero_stage ? `, ZeRO ${p.hardware.zero_stage}` : ""}`],
  ["Started", (p) => p.started],
];

// A row for each [name, values], with a value for each of the columns.
function comparison(heading, rows, columns = RUNS.map((run) => run.name)) {
  const differ = rows.map(([, values]) => moreThanOne(values.map(written)));
  return el("div", { class: "scroll" }, el("table", { class: "plain config" },
    el("thead", {}, el("tr", {}, el("th", {}, heading), columns.map((column) => el("th", {}, column)))),
    el("tbody", {}, rows.map(([name, values], n) => el("tr", { class: differ[n] && !differ.every(Boolean) ? "differs" : null }, el("th", {}, name), values.map((value) => el("td", {}, written(value))))))));
}

function provenance() {
  const origins = RUNS.map((run) => run.config.provenance || {});
  if (!origins.some((origin) => Object.keys(origin).length)) return "";
  const rows = ORIGINS.map(([name, of]) => [name, origins.map(of)]).filter(([, values]) => values.some((value) => value !== undefined && value !== null));
  const all = origins.map((origin) => new Map(flat(origin)));
  const names = [...new Set(all.flatMap((origin) => [...origin.keys()]))];
  return [el("h2", {}, RUNS.length > 1 ? "Where the runs come from" : "Where the run comes from"), comparison("", rows),
    el("details", { id: "provenance" }, el("summary", {}, "Everything that was recorded: command line, versions, hardware"), comparison("", names.map((name) => [name, all.map((origin) => origin.get(name))])))];
}

function configuration() {
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.config)))].filter((name) => name !== "provenance");
  const row = (name) => [name, RUNS.map((run) => run.config[name])];
  const differ = names.filter((name) => moreThanOne(row(name)[1].map(written)));
  const given = names.filter((name) => name in DATA.defaults && RUNS.some((run) => name in run.config && written(run.config[name]) !== written(DATA.defaults[name])));
  // Options in which the seeds of one experiment differ come last.
  for (const some of [differ, given]) some.sort((a, b) => DATA.of_one_run.includes(a) - DATA.of_one_run.includes(b));
  const own = given.length ? comparison("Option", given.map((name) => [name, [...row(name)[1], DATA.defaults[name]]]), [...RUNS.map((run) => run.name), "Default"]) : el("p", { class: "empty" }, "Every option is at its default.");
  const all = el("div");
  const draw = (wanted) => all.replaceChildren(comparison("Option", names.filter((name) => name.toLowerCase().includes(wanted)).map(row)));
  draw("");
  return el("section", { id: "configuration-view" },
    RUNS.length > 1 ? [el("h2", {}, "Differences between the runs"), differ.length ? comparison("Option", differ.map(row)) : el("p", { class: "empty" }, "The runs have the same options.")] : "",
    names.length ? [el("h2", {}, "Options that are not at their default"), own] : "",
    provenance(),
    el("h2", {}, "All options"), names.length ? [
      el("div", { class: "controls" }, el("input", { type: "search", placeholder: "Search options", "aria-label": "Search options", oninput: (event) => draw(event.target.value.trim().toLowerCase()) })), all]
      : el("p", { class: "empty" }, "The run has no run.yaml."));
}
