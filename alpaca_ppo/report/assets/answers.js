// Tables of answers, the search in them, and the panel that shows one answer.

const A = (name, i) => ANSWERS[name][i];
const promptOf = (i) => DATA.prompts[A("prompt", i)];
// The last message of the user, or the whole prompt if that is no conversation.
const questionOf = (i) => DATA.prompts[A("question", i)];
const ROW = 36;
const list = { preset: "all", sort: "step", down: true, search: "", run: "", table: "", from: "", to: "", rows: [], compare: "first", top: 0 };
const everyAnswer = Array.from({ length: NUM_ANSWERS }, (_, i) => i);
const searched = [];

function searchText(i) {
  searched[i] ??= `${promptOf(i)}\n${A("response", i)}`.toLowerCase();
  return searched[i];
}

// The answers to one prompt at several steps, in the order of steps, by answer.
const FOLLOWED = (() => {
  const groups = new Map();
  for (const i of everyAnswer) {
    if (A("prompt_id", i) === null) continue;
    const key = JSON.stringify([A("run", i), A("table", i), A("prompt", i), A("prompt_id", i), A("sample_id", i)]);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(i);
  }
  const by = new Map();
  for (const members of groups.values()) {
    members.sort((a, b) => A("step", a) - A("step", b));
    if (A("step", members[0]) !== A("step", members[members.length - 1])) for (const i of members) by.set(i, members);
  }
  return by;
})();

const IDENTICAL = (() => {
  const groups = new Map();
  for (const i of everyAnswer) {
    const key = `${A("run", i)}|${A("response", i)}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(i);
  }
  return groups;
})();
const copies = (i) => IDENTICAL.get(`${A("run", i)}|${A("response", i)}`).length;

// How much of the words of two texts is not shared, from 0 to 1.
function wordChange(a, b) {
  const count = (text) => text.split(/\s+/).filter(Boolean).reduce((m, w) => m.set(w, (m.get(w) || 0) + 1), new Map());
  const x = count(a), y = count(b);
  let shared = 0, total = 0;
  for (const [word, n] of x) { shared += Math.min(n, y.get(word) || 0); total += n; }
  for (const n of y.values()) total += n;
  return total ? 1 - (2 * shared) / total : 0;
}

const changes = new Map();

// From the first to the last answer to the prompt of answer i; null if it was answered once.
function changeOf(i) {
  const members = FOLLOWED.get(i);
  if (!members) return null;
  if (!changes.has(members)) {
    const first = members[0], last = members[members.length - 1];
    const scored = A("score", first) !== null && A("score", last) !== null;
    changes.set(members, { first, last, score: scored ? A("score", last) - A("score", first) : null, words: wordChange(A("response", first), A("response", last)) });
  }
  return changes.get(members);
}

const isLast = (i) => changeOf(i)?.last === i;
const PRESETS = {
  all: { label: "All", sort: "step", down: true, why: "No answers were logged (num_logged_rollouts, or an eval dataset)." },
  best: { label: "Best", sort: "score", down: true, keep: (i) => A("score", i) !== null, why: "No answer has a score." },
  worst: { label: "Worst", sort: "score", down: false, keep: (i) => A("score", i) !== null, why: "No answer has a score." },
  changed: { label: "Most changed", sort: "change", down: true, keep: isLast, why: "No prompt was answered at two steps: it takes an eval dataset, or num_inspected_prompts." },
  "most-kl": { label: "Most KL", sort: "kl", down: true, keep: (i) => A("kl", i) !== null, why: "No answer has a KL." },
  truncated: { label: "Truncated", sort: "step", down: true, keep: (i) => A("stopped", i) === false, why: "Every answer came to its end." },
  identical: { label: "Identical", sort: "copies", down: true, keep: (i) => copies(i) > 1, why: "No two answers of a run are the same." },
  followed: { label: "Followed prompts", sort: "step", down: true, keep: (i) => isLast(i) && A("table", i) !== "rollouts" && Boolean(tokensOf(i)), why: "No prompt was followed through training: it takes num_inspected_prompts." },
};
const several = (name) => new Set(ANSWERS[name]).size > 1;
const FIELDS = [
  { key: "step", label: "Step", value: (i) => A("step", i) },
  { key: "run", label: "Run", value: (i) => RUNS[A("run", i)].name, when: () => RUNS.length > 1, wide: true },
  { key: "table", label: "Table", value: (i) => A("table", i), when: () => several("table"), wide: true },
  { key: "score", label: "Score", value: (i) => A("score", i) },
  { key: "change", label: "Change", value: (i) => { const c = changeOf(i); return c && (c.score === null ? c.words : Math.abs(c.score)); }, text: (i) => { const c = changeOf(i); return !c ? "–" : c.score === null ? "–" : (c.score > 0 ? "+" : "") + short(c.score); }, when: () => ["changed", "followed"].includes(list.preset) },
  { key: "words", label: "Words changed", value: (i) => changeOf(i)?.words ?? null, text: (i) => (changeOf(i) ? `${Math.round(100 * changeOf(i).words)}%` : "–"), when: () => ["changed", "followed"].includes(list.preset), wide: true },
  { key: "copies", label: "Copies", value: copies, when: () => list.preset === "identical" },
  { key: "kl", label: "KL", value: (i) => A("kl", i) },
  { key: "length", label: "Tokens", value: (i) => A("length", i), wide: true },
  { key: "ended", label: "Ended", value: (i) => (A("stopped", i) === null ? "–" : A("stopped", i) ? "yes" : "cut off"), wide: true },
  { key: "prompt", label: "Prompt", value: questionOf, long: true },
  { key: "response", label: "Answer", value: (i) => A("response", i), long: true },
];
const fieldsShown = () => FIELDS.filter((field) => !field.when || field.when());

function filterAnswers() {
  const preset = PRESETS[list.preset];
  const words = list.search.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = everyAnswer.filter((i) =>
    (!preset.keep || preset.keep(i)) && !view.hidden.has(A("run", i))
    && (list.run === "" || A("run", i) === Number(list.run)) && (list.table === "" || A("table", i) === list.table)
    && (list.from === "" || A("step", i) >= Number(list.from)) && (list.to === "" || A("step", i) <= Number(list.to))
    && words.every((word) => searchText(i).includes(word)));
  const field = FIELDS.find((f) => f.key === list.sort) || FIELDS[0];
  const keyed = rows.map((i) => [field.value(i), i]);
  const direction = list.down ? -1 : 1;
  keyed.sort(([a, i], [b, j]) => {
    if (a === b) return i - j;
    if (a === null || a === undefined) return 1;
    if (b === null || b === undefined) return -1;
    return (typeof a === "string" ? a.localeCompare(b) : a - b) * direction;
  });
  list.rows = keyed.map(([, i]) => i);
}

function answersView(opened) {
  filterAnswers();
  const box = el("div", { class: "rows", tabindex: 0, role: "region", "aria-label": "Answers. Arrow keys move, Enter opens." });
  const count = el("span", { class: "faint", id: "count", role: "status" });
  const table = el("table", { class: "answers" });
  box.append(table);
  const panel = el("div", { id: "inspector" });
  let cursor = opened === null ? 0 : Math.max(0, list.rows.indexOf(opened));
  const open = (i) => {
    opened = i;
    cursor = Math.max(0, list.rows.indexOf(i));
    history.replaceState(null, "", `#answers/${i}`);
    root.classList.add("open");
    panel.replaceChildren(...inspect(i, move, close, open));
    paintRows();
  };
  const close = () => {
    opened = null;
    root.classList.remove("open");
    panel.replaceChildren(empty());
    history.replaceState(null, "", "#answers");
    hideTip();
    paintRows();
    box.focus();
  };
  const move = (by) => {
    const next = list.rows[Math.min(list.rows.length - 1, Math.max(0, cursor + by))];
    if (next === undefined) return;
    open(next);
    reveal();
  };
  const reveal = () => {
    const y = cursor * ROW;
    if (y < box.scrollTop) box.scrollTop = y;
    if (y + 2 * ROW > box.scrollTop + box.clientHeight) box.scrollTop = y + 2 * ROW - box.clientHeight;
  };
  // Only the rows on the screen are in the document, so that thousands cost no more than a few.
  const paintRows = () => {
    box.style.setProperty("--rows", list.rows.length + 1);
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - 6);
    const last = Math.min(list.rows.length, first + Math.ceil((box.clientHeight || 600) / ROW) + 14);
    const fields = fieldsShown();
    const spacer = (height) => el("tr", { class: "spacer", style: `height:${height}px` });
    table.replaceChildren(
      el("thead", {}, el("tr", {}, fields.map((field) => el("th", { class: cellClass(field), "aria-sort": list.sort === field.key ? (list.down ? "descending" : "ascending") : "none" },
        el("button", { type: "button", "data-sort": field.key, onclick: () => { list.down = list.sort === field.key ? !list.down : !field.long; list.sort = field.key; refresh(); } },
          field.label, list.sort === field.key ? (list.down ? " ▼" : " ▲") : ""))))),
      el("tbody", {}, spacer(first * ROW), list.rows.slice(first, last).map((i) => el("tr", {
        "data-answer": i, class: i === opened ? "opened" : null, "aria-selected": String(i === opened), onclick: () => open(i),
      }, fields.map((field) => el("td", { class: cellClass(field), dir: field.long ? "auto" : null }, field.long ? field.value(i).slice(0, 300) : field.text ? field.text(i) : short(field.value(i)))))), spacer((list.rows.length - last) * ROW)));
    count.textContent = `${list.rows.length} of ${NUM_ANSWERS} answers`;
    none.hidden = list.rows.length > 0;
    none.textContent = everyAnswer.some((i) => !PRESETS[list.preset].keep || PRESETS[list.preset].keep(i)) ? "Nothing matches; clear the search or the filters." : PRESETS[list.preset].why;
  };
  const none = el("p", { class: "empty", hidden: true });
  const refresh = () => { filterAnswers(); box.scrollTop = 0; cursor = Math.max(0, list.rows.indexOf(opened)); paintRows(); };
  box.addEventListener("scroll", () => { list.top = box.scrollTop; paintRows(); });
  box.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (by !== undefined) { event.preventDefault(); move(opened === null ? Math.min(by - 1, by) + (by < 0 ? 1 : 0) : by); }
    if (event.key === "Enter" && list.rows.length) { open(list.rows[cursor]); panel.querySelector(".tokens")?.focus(); }
  });
  const root = el("section", { id: "answers-view" },
    el("div", { class: "listing" }, listControls(refresh), el("div", { class: "controls" }, count), none, box), panel);
  const empty = () => el("p", { class: "empty" }, NUM_ANSWERS ? "Choose an answer to see its tokens. Keys: ↑ ↓ through the list, ← → through tokens, 1 to 7 for the colours, / to search, n and p for the next and the previous answer." : "");
  panel.append(empty());
  requestAnimationFrame(() => { paintRows(); if (opened !== null && opened < NUM_ANSWERS) { open(opened); reveal(); } else box.scrollTop = list.top; });
  root.move = move;
  root.close = close;
  return root;
}

const cellClass = (field) => [field.long ? "long" : "num", field.wide ? "wide" : "", field.key].join(" ");

function listControls(refresh) {
  const set = (name) => (event) => { list[name] = event.target.value; refresh(); };
  const filter = (name, label, options) => el("label", {}, `${label} `, el("select", { "data-filter": name, onchange: set(name) },
    el("option", { value: "" }, "all"), options.map(([value, text]) => el("option", { value, selected: String(value) === list[name] }, text))));
  return [
    choice("Show", Object.entries(PRESETS).map(([key, preset]) => [key, preset.label]), list.preset, (key) => {
      list.preset = key; list.sort = PRESETS[key].sort; list.down = PRESETS[key].down; refresh();
    }),
    el("div", { class: "controls" },
      el("input", { type: "search", id: "search", placeholder: "Search prompts and answers", "aria-label": "Search prompts and answers", value: list.search, oninput: set("search") }),
      RUNS.length > 1 ? filter("run", "Run", RUNS.map((run, i) => [i, run.name])) : "",
      several("table") ? filter("table", "Table", [...new Set(ANSWERS.table)].map((name) => [name, name])) : "",
      el("label", {}, "Steps ", el("input", { type: "number", "aria-label": "From step", placeholder: "from", value: list.from, oninput: set("from") }), " – ",
        el("input", { type: "number", "aria-label": "To step", placeholder: "to", value: list.to, oninput: set("to") }))),
  ];
}

function facts(i) {
  const scores = A("scores", i);
  const rows = [["Score", exact(A("score", i))], ["KL (nats)", exact(A("kl", i))], ["Tokens", exact(A("length", i))], ["Ended", A("stopped", i) === null ? "–" : A("stopped", i) ? "with a stop token" : "cut off"]];
  if (copies(i) > 1) rows.push(["Same answer", `${copies(i)} times in this run`]);
  return el("dl", { class: "facts" }, [...rows, ...Object.entries(scores || {}).map(([name, value]) => [name.replace(/^scores\//, ""), typeof value === "boolean" ? (value ? "yes" : "no") : exact(value)])]
    .map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

// The chosen answer and, side by side, the one it is compared with.
function inspect(i, move, close, open) {
  const members = FOLLOWED.get(i);
  const other = !members || list.compare === "none" ? null : list.compare === "first" ? members[0] : members[members.indexOf(i) - 1] ?? null;
  const shown = other === null || other === i ? [i] : [i, other];
  const withTokens = shown.filter(tokensOf);
  const usable = COLUMNS.filter((column) => withTokens.some((k) => has(k, column.key)));
  const column = usable.find((c) => c.key === inspector.column) || usable[0];
  const panes = new Map(), key = el("div"), curve = el("div", { id: "curve" });
  const details = el("div", { id: "numbers", "aria-live": "polite" });
  const hint = () => el("span", { class: "faint" }, withTokens.length ? "Point at a token, or move through them with the arrow keys, for its numbers." : "");
  details.append(hint());
  for (const k of withTokens) {
    panes.set(k, tokenPane(k, A("turns", k), (at) => {
      details.replaceChildren(at === null ? hint() : tokenNumbers(k, at));
      if (k === i) curve.firstChild?.mark?.(at === null ? null : at + 1);
    }));
  }
  const recolour = (chosen) => {
    const scale = fullScale(withTokens, chosen);
    for (const { recolour: paintPane } of panes.values()) paintPane(chosen, scale);
    key.replaceChildren(legend(chosen, scale));
    if (panes.has(i)) curve.replaceChildren(tokenCurve(i, chosen, (k) => panes.get(i).select(k, undefined, undefined, { scroll: true })));
  };
  if (column) recolour(column);
  return [
    el("div", { class: "controls heading" },
      el("button", { type: "button", class: "back", onclick: close }, "← List"),
      el("button", { type: "button", title: "Previous answer (p)", "aria-label": "Previous answer", onclick: () => move(-1) }, "‹"),
      el("button", { type: "button", title: "Next answer (n)", "aria-label": "Next answer", onclick: () => move(1) }, "›"),
      el("h2", {}, `Step ${A("step", i)}`, el("span", { class: "faint" }, ` ${RUNS.length > 1 ? `${RUNS[A("run", i)].name} · ` : ""}${A("table", i)} · prompt ${exact(A("prompt_id", i))}`))),
    facts(i),
    bubble("prompt", el("div", { class: "text", dir: "auto" }, questionOf(i)), questionOf(i) === promptOf(i) ? "" : el("details", { class: "whole" },
      el("summary", { class: "faint" }, "The whole prompt, as the model reads it"), el("div", { class: "text", dir: "auto" }, promptOf(i)))),
    ...promptColumns(i),
    members ? stepChoice(i, members, open) : "",
    column ? choice("Colour by", COLUMNS.map((c, n) => [c.key, c.label, usable.includes(c) ? "" : whyMissing([c])]), column.key, (chosen) => {
      inspector.column = chosen;
      recolour(COLUMNS.find((c) => c.key === chosen));
    }) : "",
    column && usable.length < COLUMNS.length ? el("p", { class: "faint missing" }, whyMissing(COLUMNS.filter((c) => !usable.includes(c)))) : "",
    key,
    el("div", { class: shown.length > 1 ? "sides two" : "sides" }, shown.map((k) => side(k, panes, shown.length > 1, members))),
    withTokens.length ? details : "", curve, members ? throughTraining(members, open) : "",
  ];
}

// Why numbers of an answer's tokens are not there.
function whyMissing(columns) {
  const names = columns.map((c) => c.label).join(", ");
  const some = columns.some((c) => c.key === "ratio" || c.key === "entropies");
  return `Not logged for this answer: ${names}.${some ? " Ratio and entropy are those of training steps that log entropies; an evaluation has no advantages and rewards." : ""}`;
}

const words = (text) => text.split(/\s+/).filter(Boolean).join(" ");

// The dataset's columns beside the prompt. Those that the prompt was made of are folded, and empty ones; never a short
// one or a reference answer, which a prompt may hold by chance.
const REFERENCE = /answer|solution|reference|target|label|truth|gold|expected|output|response|completion/i;
const isPartOf = (prompt, name, text) => !REFERENCE.test(name) && words(text).split(" ").length > 2 && prompt.includes(words(text));

function promptColumns(i) {
  const all = Object.entries(A("more", i) || {}).map(([name, value]) => [name, written(value)]);
  const prompt = words(promptOf(i)), empty = (text) => ["", "null", "[]", "{}", "–"].includes(text.trim());
  const known = all.filter(([name, text]) => empty(text) || isPartOf(prompt, name, text));
  const list = (rows) => el("dl", { class: "columns" }, rows.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", { class: "text", dir: "auto" }, text))));
  const shown = all.filter((entry) => !known.includes(entry));
  return [shown.length ? list(shown) : "", known.length ? el("details", { class: "known" },
    el("summary", { class: "faint" }, `${known.length} more ${known.length === 1 ? "column" : "columns"}, empty or part of the prompt: ${known.map(([name]) => name).join(", ")}`), list(known)) : ""].filter(Boolean);
}

function side(k, panes, named, members) {
  const name = named ? el("h3", {}, `Step ${A("step", k)}`, el("span", { class: "faint" }, `${A("score", k) === null ? "" : ` score ${exact(A("score", k))},`} KL ${short(A("kl", k))}${k === members[0] ? ` · ${firstAnswer(k)}` : ""}`)) : "";
  return el("div", { class: "side", "data-side": k }, name, panes.has(k) ? panes.get(k).pane : plainAnswer(k));
}

// At step 0 the policy is the reference if every one of its tokens has no KL.
function firstAnswer(k) {
  const kl = tokensOf(k)?.numbers.kl;
  if (A("step", k) !== 0) return "the first that was logged";
  return kl && kl.every((value) => value === null || Math.abs(value) < 1e-3) ? "before training: the reference's own answer" : "before training";
}

function plainAnswer(k) {
  const turns = A("turns", k);
  const text = turns ? turns.map((turn) => bubble(String(turn.role), el("div", { class: "text", dir: "auto" }, turn.text)))
    : el("div", { class: "text tokens", dir: "auto" }, A("response", k));
  return [text, el("p", { class: "faint" }, "The numbers of this answer's tokens are not in this file: the run did not log them, or the budget was spent (see Overview).")].flat();
}

function tokenNumbers(i, k) {
  const tokens = tokensOf(i);
  return el("div", {}, el("b", {}, `Token ${k + 1} of ${tokens.texts.length}: “${visible(tokens.texts[k])}”`), el("span", { class: "faint" }, ` id ${exact(tokens.ids[k])}`),
    tokens.environment?.[k] ? el("p", {}, "Not written by the policy: it has no numbers.") : el("dl", { class: "facts" }, numbersAt(i, k).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
}

// The steps at which the prompt was answered, and what stands beside the answer.
function stepChoice(i, members, open) {
  const steps = choice("Step", members.map((k) => [String(k), String(A("step", k))]), String(i), (k) => open(Number(k)));
  steps.classList.add("steps");
  return el("div", { class: "controls through" }, steps, choice("Beside it", [["first", "First answer"], ["previous", "Step before"], ["none", "Nothing"]], list.compare, (value) => { list.compare = value; open(i); }));
}

// The scores of the answers to one prompt, step by step.
function throughTraining(members, open) {
  const scored = members.filter((k) => A("score", k) !== null);
  if (scored.length < 2) return "";
  return el("div", { id: "through" }, chart({
    title: "This prompt through training", note: "score by step; click a point", height: 150,
    series: [{ name: "score", colour: "var(--accent)", x: scored.map((k) => A("step", k)), y: scored.map((k) => A("score", k)) }],
    onPick: (step) => open(scored.find((k) => A("step", k) === step)),
  }));
}
