// One line chart as SVG, and one of points joined in the order of steps.

const CHART = { width: 460, height: 220, left: 54, right: 12, top: 10, bottom: 36 };

function ticks(low, high, count) {
  const step = 10 ** Math.floor(Math.log10((high - low) / count));
  const size = [1, 2, 5, 10].map((m) => m * step).find((s) => (high - low) / s <= count + 1.5) || step * 10;
  const first = Math.ceil(low / size - 1e-9);
  const last = Math.floor(high / size + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, k) => Number(((first + k) * size).toPrecision(12)));
}

// Ticks in as many decimals as tell them apart.
function tickTexts(values) {
  const size = Math.max(...values.map(Math.abs)), texts = values.map(short);
  if (new Set(texts).size === texts.length || size >= 1e5) return texts;
  const decimals = Math.min(9, Math.max(0, Math.ceil(-Math.log10(values[1] - values[0]) - 1e-9)));
  return values.map((value) => value.toFixed(decimals).replace("-", "−"));
}

function range(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  const pad = high > low ? (high - low) * 0.05 : Math.abs(high) * 0.1;
  return pad ? [low - pad, high + pad] : [-0.1, 1];
}

const moreThanOne = (values) => values.some((value) => value !== values[0]);

// title: shown above the chart, or null; about: its name for screen readers.
// series: {name, colour, dash, x, y, low, high}; low and high are the band around the line, or absent. steps: further
// places that the x-axis has to reach.
function chart({ title, about = title, note, series, steps = [], xLabel = "step", height = CHART.height, points = false, best = null, onPick = null }) {
  const { width, left, right, top, bottom } = CHART;
  const xs = [...series.flatMap((s) => s.x), ...steps];
  const ys = series.flatMap((s) => [...s.y, ...(s.low || []), ...(s.high || [])]);
  const [x0, x1] = moreThanOne(xs) ? extremes(xs) : [(xs[0] ?? 0) - 1, (xs[0] ?? 0) + 1];
  const [y0, y1] = range(ys);
  const px = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
  const py = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - top - bottom);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img", "aria-label": describe(about, series) });
  const rows = ticks(y0, y1, 4), labels = tickTexts(rows);
  for (const [k, y] of rows.entries()) {
    drawing.append(
      svg("line", { class: "grid", x1: left, x2: width - right, y1: py(y), y2: py(y) }),
      svg("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, labels[k]),
    );
  }
  const whole = xs.every(Number.isInteger);
  for (const x of moreThanOne(xs) ? ticks(x0, x1, 6).filter((tick) => !whole || Number.isInteger(tick)) : xs.slice(0, 1)) drawing.append(svg("text", { x: px(x), y: height - bottom + 15, "text-anchor": "middle" }, short(x)));
  drawing.append(svg("text", { class: "axis", x: width - right, y: height - 5, "text-anchor": "end" }, xLabel));
  for (const s of series) {
    if (s.low) {
      const band = [...s.x.map((x, k) => `${px(x)},${py(s.high[k])}`), ...s.x.map((x, k) => `${px(x)},${py(s.low[k])}`).reverse()];
      drawing.append(svg("polygon", { class: "band", points: band.join(" "), style: `fill:${s.colour}` }));
    }
    drawing.append(svg("polyline", {
      class: points ? "line thin" : "line", points: s.x.map((x, k) => `${px(x).toFixed(1)},${py(s.y[k]).toFixed(1)}`).join(" "),
      style: `stroke:${s.colour}`, "stroke-dasharray": s.dash || null,
    }));
    if (points || s.x.length < 12) {
      s.x.forEach((x, k) => drawing.append(svg("circle", { cx: px(x), cy: py(s.y[k]), r: 3, style: `fill:${s.colour}` })));
    }
  }
  if (best !== null && best >= x0 && best <= x1) drawing.append(svg("line", { class: "best", x1: px(best), x2: px(best), y1: top, y2: height - bottom }, svg("title", {}, `step ${best}: the best checkpoint`)));
  const figure = el("figure", { class: "chart" }, title ? el("figcaption", {}, el("b", {}, title), note ? el("span", {}, ` ${note}`) : "") : "", drawing);
  const mark = svg("line", { class: "mark", y1: top, y2: height - bottom, visibility: "hidden" });
  drawing.append(mark);
  // Marks one place on the x-axis; null takes the mark away.
  figure.mark = (x) => {
    mark.setAttribute("visibility", x === null ? "hidden" : "visible");
    if (x !== null) { mark.setAttribute("x1", px(x)); mark.setAttribute("x2", px(x)); }
  };
  followPointer(drawing, { series, px, py, x0, x1, height, xLabel, points, onPick });
  return figure;
}

const extremes = (values) => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);

function describe(about, series) {
  const ends = series.map((s) => `${s.name} from ${short(s.y[0])} to ${short(s.y[s.y.length - 1])}`);
  return `${about}: ${ends.join("; ")}`;
}

function nearest(values, target) {
  let best = 0;
  for (let k = 1; k < values.length; k++) if (Math.abs(values[k] - target) < Math.abs(values[best] - target)) best = k;
  return best;
}

// The values under the pointer, or under the arrow keys.
function followPointer(drawing, { series, px, py, x0, x1, height, xLabel, points, onPick }) {
  const { width, left, right, top, bottom } = CHART;
  const ruler = svg("line", { class: "ruler", y1: top, y2: height - bottom, visibility: "hidden" });
  const dots = series.map((s) => svg("circle", { r: 4, visibility: "hidden", style: `fill:${s.colour}` }));
  drawing.append(ruler, ...dots);
  const drawn = series.filter((s) => s.x.length);
  let at = null;
  const show = (x, clientX, clientY) => {
    if (!drawn.length) return;
    const lead = drawn.reduce((best, s) => (Math.abs(s.x[nearest(s.x, x)] - x) < Math.abs(best.x[nearest(best.x, x)] - x) ? s : best));
    at = lead.x[nearest(lead.x, x)];
    ruler.setAttribute("x1", px(at));
    ruler.setAttribute("x2", px(at));
    ruler.setAttribute("visibility", points ? "hidden" : "visible");
    const rows = [];
    series.forEach((s, k) => {
      const i = s.x.length ? nearest(s.x, at) : -1;
      const hit = i >= 0 && (points || s.x[i] === at);
      dots[k].setAttribute("visibility", hit ? "visible" : "hidden");
      if (!hit) return;
      dots[k].setAttribute("cx", px(s.x[i]));
      dots[k].setAttribute("cy", py(s.y[i]));
      const spread = s.high ? ` ± ${short(s.high[i] - s.y[i])}` : "";
      rows.push([s.name, `${exact(s.exact ? s.exact[i] : s.y[i])}${spread}${points ? ` at ${short(s.x[i])}${s.steps ? `, step ${s.steps[i]}` : ""}` : ""}`]);
    });
    const box = drawing.getBoundingClientRect();
    showTip(rows, clientX ?? box.left + (px(at) / width) * box.width, clientY ?? box.top + box.height / 2, `${xLabel} ${short(at)}`);
  };
  const toX = (event) => {
    const box = drawing.getBoundingClientRect();
    return x0 + ((((event.clientX - box.left) / box.width) * width - left) / (width - left - right)) * (x1 - x0);
  };
  drawing.addEventListener("pointermove", (event) => show(toX(event), event.clientX, event.clientY));
  const hide = () => {
    hideTip();
    for (const mark of [ruler, ...dots]) mark.setAttribute("visibility", "hidden");
  };
  drawing.addEventListener("pointerleave", hide);
  drawing.addEventListener("blur", hide);
  if (onPick) drawing.addEventListener("click", (event) => { show(toX(event), event.clientX, event.clientY); onPick(at); });
  drawing.addEventListener("keydown", (event) => {
    const all = [...new Set(drawn.flatMap((s) => s.x))].sort((a, b) => a - b);
    const k = at === null ? -1 : all.indexOf(at);
    const next = { ArrowRight: Math.min(all.length - 1, k + 1), ArrowLeft: Math.max(0, k - 1), Home: 0, End: all.length - 1 }[event.key];
    if (event.key === "Enter" && onPick && at !== null) onPick(at);
    if (event.key === "Escape") hide();
    if (next === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    show(all[next]);
  });
}
