// The token inspector: the tokens of one answer, coloured by one of their numbers.

// Signed numbers are blue below their middle and orange above it, which the colour-blind tell apart.
const COLUMNS = [
  { key: "advantages", label: "Advantage", middle: 0 },
  { key: "values", label: "Value", middle: 0 },
  { key: "kl", label: "KL", middle: 0 },
  { key: "logprobs", label: "Log-prob", middle: null },
  { key: "ratio", label: "Ratio", middle: 1 },
  { key: "shaped_rewards", label: "Reward", middle: 0 },
  { key: "entropies", label: "Entropy", middle: null },
];
const LABELS = new Map([...COLUMNS.map((c) => [c.key, c.label]), ["ref_logprobs", "Reference's log-prob"], ["returns", "Return"]]);
const inspector = { column: "advantages" };

const tokensOf = (i) => DATA.tokens[i];
const has = (i, key) => Boolean(tokensOf(i)?.numbers[key]?.some((value) => value !== null));

// The distance from the middle at which a colour is full: the 95th percentile, so that one outlier leaves the rest visible.
function fullScale(shown, column) {
  const middle = column.middle ?? 0;
  const sizes = shown.flatMap((i) => tokensOf(i)?.numbers[column.key] || []).filter((v) => v !== null).map((v) => Math.abs(v - middle));
  sizes.sort((a, b) => a - b);
  return sizes.length ? sizes[Math.min(sizes.length - 1, Math.floor(sizes.length * 0.95))] || sizes[sizes.length - 1] || 1 : 1;
}

function paint(span, value, column, scale) {
  span.classList.remove("above", "below", "size");
  if (value === null || value === undefined) return;
  const middle = column.middle ?? 0;
  span.classList.add(column.middle === null ? "size" : value < middle ? "below" : "above");
  span.style.setProperty("--w", `${Math.round(Math.min(1, Math.abs(value - middle) / scale) * 88)}%`);
}

function numbersAt(i, k) {
  const tokens = tokensOf(i);
  if (tokens.environment?.[k]) return [["written by", "the environment, not the policy"]];
  return Object.keys(tokens.numbers).map((key) => [LABELS.get(key) || key, exact(tokens.numbers[key][k])]);
}

function legend(column, scale) {
  const middle = column.middle ?? 0;
  const low = column.middle === null ? [] : [el("span", {}, `≤ ${short(middle - scale)}`)];
  const sign = column.key === "logprobs" ? -1 : 1;
  const kind = column.middle === null ? "sequential" : "diverging";
  return el("div", { class: "legend" }, low.length ? low : el("span", {}, "0"), el("span", { class: `ramp ${kind}`, "aria-hidden": "true" }),
    el("span", {}, sign > 0 ? `≥ ${short(middle + scale)}` : `≤ ${short(-scale)}`),
    column.middle === null ? "" : el("span", { class: "faint" }, `middle ${middle}`));
}

// The stretches of an answer by who wrote them: the policy, or its environment.
function stretches(tokens) {
  const parts = [];
  tokens.texts.forEach((text, k) => {
    const environment = Boolean(tokens.environment?.[k]);
    if (!parts.length || parts[parts.length - 1].environment !== environment) parts.push({ environment, tokens: [] });
    parts[parts.length - 1].tokens.push(k);
  });
  return parts;
}

// Who wrote each stretch, by the roles of the answer's turns; neighbours that are not the policy are one stretch.
function authors(parts, turns) {
  const roles = [];
  for (const turn of turns || []) {
    const role = String(turn.role), environment = role !== "policy", last = roles[roles.length - 1];
    if (last?.environment !== environment) roles.push({ environment, names: [role] });
    else if (!last.names.includes(role)) last.names.push(role);
  }
  const known = roles.length === parts.length && roles.every(({ environment }, n) => environment === parts[n].environment);
  return parts.map((part, n) => (known ? roles[n].names.join(" and ") : part.environment ? "environment" : "policy"));
}

function bubble(who, ...content) {
  const kind = who === "prompt" || who === "policy" ? who : "environment";
  return el("div", { class: `bubble ${kind}` }, el("div", { class: "who" }, who.slice(0, 1).toUpperCase() + who.slice(1)), ...content);
}

// The tokens of answer i with pointer and keyboard; onSelect(k) is called for the token that is looked at, or null.
function tokenPane(i, turns, onSelect) {
  const tokens = tokensOf(i), spans = [];
  const make = (k) => {
    spans[k] = el("span", { class: "t", "data-k": k }, visible(tokens.texts[k]));
    return spans[k];
  };
  const parts = stretches(tokens);
  const who = authors(parts, turns);
  const content = parts.length > 1
    ? parts.map((part, n) => bubble(who[n], el("div", { class: "text", dir: "auto" }, part.tokens.map(make))))
    : el("div", { class: "text", dir: "auto" }, tokens.texts.map((_, k) => make(k)));
  const pane = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens. The arrow keys move from token to token." }, content);
  let at = null;
  const select = (k, x, y, { scroll = false } = {}) => {
    if (k === at && k !== null && !tip.hidden) return;
    if (at !== null) spans[at].classList.remove("at");
    at = k;
    onSelect(k);
    if (k === null) return hideTip();
    spans[k].classList.add("at");
    if (scroll) spans[k].scrollIntoView({ block: "nearest" });
    const box = spans[k].getBoundingClientRect();
    showTip(numbersAt(i, k), x ?? box.left, y ?? box.bottom - 10, `${k + 1}. “${visible(tokens.texts[k])}” · id ${exact(tokens.ids[k])}`, "token");
  };
  const under = (event) => event.target.closest?.(".t")?.dataset.k;
  pane.addEventListener("pointermove", (event) => { if (under(event) !== undefined) select(Number(under(event)), event.clientX, event.clientY); });
  pane.addEventListener("pointerleave", () => hideTip());
  pane.addEventListener("click", (event) => { if (under(event) !== undefined) select(Number(under(event)), event.clientX, event.clientY); });
  pane.addEventListener("blur", () => hideTip());
  pane.addEventListener("keydown", (event) => {
    const last = spans.length - 1;
    const next = { ArrowRight: Math.min(last, (at ?? -1) + 1), ArrowLeft: Math.max(0, (at ?? 1) - 1), Home: 0, End: last,
      ArrowDown: lineStep(spans, at ?? 0, 1), ArrowUp: lineStep(spans, at ?? 0, -1) }[event.key];
    if (event.key === "Escape" && at !== null) { select(null); event.stopPropagation(); }
    if (next === undefined) return;
    event.preventDefault();
    select(next, undefined, undefined, { scroll: true });
  });
  const recolour = (column, scale) => spans.forEach((span, k) => paint(span, tokens.numbers[column.key]?.[k], column, scale));
  return { pane, recolour, select };
}

// The token above or below token k on the screen.
function lineStep(spans, k, direction) {
  const from = spans[k].getBoundingClientRect();
  let best = k, distance = Infinity, line = null;
  for (let j = k + direction; j >= 0 && j < spans.length; j += direction) {
    const box = spans[j].getBoundingClientRect();
    if (Math.abs(box.top - from.top) < from.height / 2) continue;
    line ??= box.top;
    if (Math.abs(box.top - line) > from.height / 2) break;
    if (Math.abs(box.left - from.left) < distance) { distance = Math.abs(box.left - from.left); best = j; }
  }
  return best;
}

// Value and return under each token; without a critic the number that the tokens are coloured by.
function tokenCurve(i, column, onPick) {
  const tokens = tokensOf(i);
  const keys = has(i, "values") ? ["values", "returns"] : [column.key];
  const series = keys.filter((key) => has(i, key)).map((key, n) => {
    const known = tokens.numbers[key].map((value, k) => k).filter((k) => tokens.numbers[key][k] !== null);
    return { name: LABELS.get(key) || key, colour: n ? "var(--muted)" : "var(--accent)", dash: n ? "5 3" : "", x: known.map((k) => k + 1), y: known.map((k) => tokens.numbers[key][k]) };
  });
  if (!series.length) return "";
  const title = series.map((s) => s.name).join(" and ");
  const note = series.length > 1 ? "solid: the critic's value; dashed: the return that was its target" : "";
  return chart({ title, note, series, xLabel: "token", height: 150, onPick: (x) => onPick(x - 1) });
}
