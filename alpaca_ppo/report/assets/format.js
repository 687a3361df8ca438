// Elements, numbers and the data of the page. Texts of a run reach the page as text nodes only, never as HTML.

const DATA = JSON.parse(document.getElementById("data").textContent);
DATA.tokens = JSON.parse(document.getElementById("tokens").textContent);
const RUNS = DATA.runs;
const ANSWERS = DATA.answers;
const NUM_ANSWERS = ANSWERS.step.length;
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) node.append(child);
  }
  return node;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function short(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(1).replace("-", "−").replace("e−", "e-").replace("e+", "e");
  return String(Number(value.toPrecision(size >= 1000 ? 4 : 3))).replace("-", "−");
}

// The number as the run wrote it.
const exact = (value) => (value === null || value === undefined ? "–" : String(value).replace(/^-/, "−"));

// White space that a reader could not see.
const visible = (text) => (text === "" ? "∅" : text.replace(/\r/g, "␍").replace(/\t/g, "⇥\t").replace(/\n/g, "↵\n"));

const runColour = (i) => `var(--run${i % 7})`;
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "12 3 2 3 2 3", "1 3", "12 4"];
const runDash = (i) => DASHES[(i + Math.floor(i / 7)) % 7];

// A piece of a line as the charts draw it, on its band if it has one.
const swatch = (colour, dash, band = false) => svg("svg", { class: "swatch", viewBox: "0 0 26 12", width: 26, height: 12, "aria-hidden": "true" },
  band ? svg("rect", { class: "band", x: 0, y: 0, width: 26, height: 12, style: `fill:${colour}` }) : null,
  svg("line", { x1: 0, x2: 26, y1: 6, y2: 6, style: `stroke:${colour};stroke-width:3`, "stroke-dasharray": dash || null }));

const tip = document.getElementById("tip");

// kind "token": a phone shows the numbers below the tokens instead.
function showTip(rows, x, y, heading, kind = "") {
  tip.className = kind;
  tip.replaceChildren(
    heading ? el("strong", {}, heading) : "",
    el("table", {}, rows.map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, value)))),
  );
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth ? Math.max(4, x - box.width - 14) : x + 14;
  const top = y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 12) : y + 18;
  tip.style.left = `${left}px`;
  tip.style.top = `${top}px`;
}

const hideTip = () => { tip.hidden = true; };

// A row of buttons of which one is chosen.
function choice(label, options, chosen, onChoose) {
  const buttons = options.map(([value, text, why]) =>
    el("button", {
      type: "button", "data-value": value, "aria-pressed": String(value === chosen), disabled: Boolean(why), title: why,
      onclick: (event) => {
        for (const button of buttons) button.setAttribute("aria-pressed", String(button === event.currentTarget));
        onChoose(value);
      },
    }, text));
  return el("div", { class: "choice", role: "group", "aria-label": label }, el("span", { class: "label" }, label), buttons);
}
