// Which metrics there are, which of them matter first, what they are called, and their series over runs or seeds.

const MAIN = [
  ["objective/scores", "Reward", "mean score of a response"],
  ["objective/kl_sum_seq", "KL to the reference", "nats a response"],
  ["teacher/kl_sum_seq", "KL to the teacher", "nats a response"],
  ["objective/response_length", "Response length", "tokens"],
  ["objective/truncated_fraction", "Truncated", "share of responses that were cut off"],
  ["ppo/val/explained_variance", "Explained variance", "of the critic; 1 is perfect"],
  ["objective/entropies", "Entropy", "nats a token"],
  ["ppo/policy/entropy", "Entropy", "nats a token, during the updates"],
  ["ppo/policy/approx_kl_k3", "KL of the update (k3)", "old policy to new, a token"],
  ["ppo/policy/clipfrac", "Clip fraction", "share of tokens"],
  ["ppo/policy/grad_norm", "Gradient norm, policy", "before clipping"],
  ["ppo/val/grad_norm", "Gradient norm, critic", "before clipping"],
  ["objective/lr", "Learning rate", "of the policy"],
  ["tokens/per_second", "Tokens a second", "of the whole step"],
];
const FIRST = 9;
// Parts of an evaluation that are looked up when its scores are surprising.
const SECONDARY = /(_se|_std|_missing|\/rewards|\/response_length|\/truncated_fraction|\/empty_fraction|\/kl_sum_seq|\/masked_rows|\/unjudged)$/;
const METRICS = [...new Set(RUNS.flatMap((run) => Object.keys(run.metrics)))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
const TITLES = new Map(MAIN.map(([name, title, note]) => [name, [title, note]]));
const view = { hidden: new Set(), perSeed: !hasSeeds(), smooth: 1, search: "", open: new Set() };

function hasSeeds() {
  return new Set(RUNS.map((run) => run.group)).size < RUNS.length;
}

// The evaluations, in the order in which people cite them; within it by name.
const CITED = [/\/pass_at_1$/, /\/avg_at_\d+$/, /\/pass_at_\d+$/, /\/win_rate$/, /\/scores$/, /\/scores\//];
const evaluations = METRICS.filter((name) => name.startsWith("eval/") && !SECONDARY.test(name));
const citation = (name) => (CITED.findIndex((pattern) => pattern.test(name)) + CITED.length + 1) % (CITED.length + 1);
evaluations.sort((a, b) => citation(a) - citation(b) || METRICS.indexOf(a) - METRICS.indexOf(b));

// The evaluation by which the best checkpoint is chosen, else the score (of the first eval set), else the first one.
const headline = RUNS.map((run) => run.config.metric_for_best_model).find((name) => METRICS.includes(name) && String(name).startsWith("eval/"))
  ?? evaluations.find((name) => /\/scores$/.test(name)) ?? evaluations[0];

// Of the two entropies the one that was logged more often: which of them is depends on old_policy.
const timesLogged = (name) => RUNS.reduce((sum, run) => sum + points(run, name).y.length, 0);
const entropy = timesLogged("ppo/policy/entropy") > timesLogged("objective/entropies") ? "ppo/policy/entropy" : "objective/entropies";

// What can be drawn against the KL to the reference.
const FRONTIERS = METRICS.includes("objective/kl_sum_seq") ? METRICS.filter((name) => /^objective\/scores(\/.+)?$/.test(name) || evaluations.includes(name)) : [];

// What is looked at first, whatever else was logged: so many that reward against KL is the last of the first nine.
const ESSENTIAL = ["objective/scores", headline, ...MAIN.slice(1).map(([name]) => name)]
  .filter((name) => METRICS.includes(name) && (!name.endsWith("/entropy") && name !== "objective/entropies" || name === entropy)).slice(0, FRONTIERS.length ? FIRST - 1 : FIRST);

// The rest that people look for, in groups.
const GROUPS = (() => {
  const taken = new Set(ESSENTIAL);
  const take = (names) => names.filter((name) => METRICS.includes(name) && !taken.has(name) && taken.add(name));
  return [
    ["Evaluation", take(evaluations)],
    ["Reward by source", take(METRICS.filter((name) => name.startsWith("objective/scores/")))],
    ["Optimization", take(MAIN.map(([name]) => name))],
  ].filter(([, names]) => names.length);
})();

function titleOf(name) {
  const [, source] = name.match(/^objective\/scores\/(.+)/) || [];
  const [, evaluated] = name.match(/^eval\/(.+)/) || [];
  return TITLES.get(name) || (source ? [`Reward: ${source}`, "mean score of the source"]
    : evaluated ? [`Evaluation: ${evaluated.replace(/_at_(\d+)/, "@$1")}`, ""] : [name, ""]);
}

// The numbers of a reward or an evaluation in all runs as one text. Null for other metrics, and if the numbers are all
// the same, which two metrics may be by chance; but pass@1 and avg@n of one eval set are the same by definition.
function fingerprint(name) {
  if (!/^(eval\/|objective\/scores)/.test(name) || SECONDARY.test(name)) return null;
  const varies = moreThanOne(RUNS.flatMap((run) => (run.metrics[name] || []).filter((value) => value !== null)));
  const always = /^(eval\/.*)(pass_at_1|avg_at_\d+)$/.exec(name);
  if (!varies && !always) return null;
  return (varies ? "" : always[1]) + JSON.stringify(RUNS.map((run) => run.metrics[name] || null));
}

// What repeats a metric, by short names: " = avg@4 = scores" beside "Evaluation: gsm8k/pass@1".
function repeats({ name, also }) {
  const part = (metric) => titleOf(metric)[0].replace(/^(Evaluation|Reward): /, "");
  const set = part(name).includes("/") ? `${part(name).split("/")[0]}/` : "";
  return also.map((other) => ` = ${set && part(other).startsWith(set) ? part(other).slice(set.length) : part(other)}`).join("");
}

// Every metric once, those that matter first. One that repeats another number by number is in the `also` of that one.
const DISTINCT = (() => {
  const seen = new Map();
  for (const name of new Set([...ESSENTIAL, ...GROUPS.flatMap(([, names]) => names), ...METRICS])) {
    const key = fingerprint(name) ?? name;
    if (seen.has(key)) seen.get(key).also.push(name);
    else seen.set(key, { name, also: [] });
  }
  return [...seen.values()];
})();
const among = (names) => DISTINCT.filter(({ name }) => names.includes(name));

function points(run, name) {
  const x = [], y = [];
  (run.metrics[name] || []).forEach((value, k) => {
    if (value !== null) { x.push(run.steps[k]); y.push(value); }
  });
  return { x, y };
}

function smoothed(values, width) {
  if (width < 2) return values;
  return values.map((_, k) => {
    const part = values.slice(Math.max(0, k - width + 1), k + 1);
    return part.reduce((sum, v) => sum + v, 0) / part.length;
  });
}

const meanOf = (values) => values.reduce((sum, v) => sum + v, 0) / values.length;

function deviation(values, mean) {
  if (values.length < 2) return 0;
  return Math.sqrt(values.reduce((sum, v) => sum + (v - mean) ** 2, 0) / (values.length - 1));
}

// The lines of a chart: each run, or the runs that differ by their seed alone together. {name, members, colour, dash}.
function lines() {
  const shown = RUNS.map((_, i) => i).filter((i) => !view.hidden.has(i));
  if (view.perSeed) return shown.map((i) => ({ name: RUNS[i].name, members: [i], colour: runColour(i), dash: runDash(i) }));
  return [...new Set(shown.map((i) => RUNS[i].group))].map((group) => {
    const members = shown.filter((i) => RUNS[i].group === group);
    const name = members.length > 1 ? `${groupName(members)} (mean of ${members.length} runs)` : RUNS[members[0]].name;
    return { name, members, colour: runColour(group), dash: runDash(group) };
  });
}

function groupName(members) {
  const names = members.map((i) => RUNS[i].name);
  let length = 0;
  while (length < names[0].length && names.every((name) => name[length] === names[0][length])) length++;
  return names[0].slice(0, length).replace(/[_\-/ ]*(seed)?[_\-/ ]*$/, "") || names[0];
}

// The mean of several series {x, y} at each x, with a band of one standard deviation.
function meanSeries(all) {
  const at = new Map();
  for (const { x, y } of all) y.forEach((value, k) => at.set(x[k], [...(at.get(x[k]) || []), value]));
  const x = [...at.keys()].sort((a, b) => a - b);
  const y = x.map((step) => meanOf(at.get(step)));
  const spread = x.map((step, k) => deviation(at.get(step), y[k]));
  return { x, y, low: y.map((m, k) => m - spread[k]), high: y.map((m, k) => m + spread[k]) };
}

// One run's series, with a band of one standard error if the evaluation has it.
function runSeries(run, name) {
  const { x, y } = points(run, name);
  const error = new Map(points(run, `${name}_se`).y.map((value, k) => [points(run, `${name}_se`).x[k], value]));
  const band = error.size && view.smooth === 1 && x.every((step) => error.has(step));
  return {
    x, y: smoothed(y, view.smooth),
    low: band ? y.map((value, k) => value - error.get(x[k])) : null, high: band ? y.map((value, k) => value + error.get(x[k])) : null,
  };
}

function seriesOf(name) {
  return lines().map(({ members, ...line }) => {
    const all = members.map((i) => runSeries(RUNS[i], name)).filter(({ x }) => x.length);
    return { ...line, ...(members.length > 1 ? meanSeries(all) : all[0] || { x: [], y: [] }) };
  }).filter(({ x }) => x.length);
}
