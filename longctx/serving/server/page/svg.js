// Charts as plain SVG, drawn anew in the pixels that there are. Colours come from classes of the style sheet.

const SPACE = { left: 44, right: 8, top: 8, bottom: 20 };

function element(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) {
    made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** A count on a scale; nothing between two counts. */
export const whole = (value) => (Number.isInteger(value) ? value.toLocaleString("en") : "");

const text = (x, y, words, anchor = "start") => element("text", { x, y, "text-anchor": anchor }, words);

function titled(made, words) {
  made.append(element("title", {}, words));
  return made;
}

/** The least round number that is no less than a value; 1 for values of 0. */
function roundUp(value) {
  if (!(value > 0)) {
    return 1;
  }
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((factor) => factor * power).find((bound) => bound >= value * 0.9999);
}

/** An empty chart with a scale of 0 to `highest` on the left; `words` describe it to who can't see it. */
function frame(plot, highest, words, format, below) {
  const width = Math.max(plot.clientWidth, 160);
  const height = Math.max(plot.clientHeight, 60);
  const top = roundUp(highest);
  const area = {
    left: SPACE.left,
    right: width - SPACE.right,
    bottom: height - SPACE.bottom,
    y: (value) => SPACE.top + (1 - value / top) * (height - SPACE.bottom - SPACE.top),
  };
  const chart = element("svg", { role: "img", "aria-label": words, width, height, viewBox: `0 0 ${width} ${height}` });
  for (const share of [0, 0.5, 1]) {
    const y = area.y(share * top);
    chart.append(element("line", { class: "grid", x1: area.left, x2: area.right, y1: y, y2: y }));
    chart.append(text(area.left - 6, y + 4, format(share * top), "end"));
  }
  chart.append(text(area.left, height - 5, below[0]), text(area.right, height - 5, below[1], "end"));
  plot.replaceChildren(chart);
  return { chart, area };
}

/** Bars of stacked parts: bars = [{title, parts: [[value, class], ...]}], of which `slots` have room. */
export function bars(plot, data, { slots, words, format = whole, below = ["", ""] }) {
  const sums = data.map((bar) => bar.parts.reduce((sum, [value]) => sum + value, 0));
  const { chart, area } = frame(plot, Math.max(0, ...sums), words, format, below);
  const pitch = (area.right - area.left) / slots;
  data.forEach((bar, i) => {
    const group = element("g", {});
    const x = area.right - (data.length - i) * pitch;
    let before = 0;
    for (const [value, name] of bar.parts) {
      const y = area.y(before + value);
      const height = area.y(before) - y;
      group.append(element("rect", { class: name, x, y, width: Math.max(pitch - (pitch > 3 ? 1 : 0), 0.5), height }));
      before += value;
    }
    chart.append(titled(group, bar.title));
  });
}

/** Step lines over x: series = [{name: class, points: [[x, y], ...]}]. */
export function lines(plot, series, { from, to, words, format = whole, below = ["", ""] }) {
  const highest = Math.max(0, ...series.flatMap(({ points }) => points.map(([, y]) => y)));
  const { chart, area } = frame(plot, highest, words, format, below);
  const scale = (area.right - area.left) / Math.max(to - from, 1e-9);
  for (const { name, points } of series) {
    const path = points.map(([x, y], i) => {
      const at = (area.left + (x - from) * scale).toFixed(1);
      return i ? `H${at}V${area.y(y).toFixed(1)}` : `M${at} ${area.y(y).toFixed(1)}`;
    });
    chart.append(element("path", { class: `line ${name}`, d: path.join("") }));
  }
}

/** One bar of each rank, lying: ranks = [{label, value, title}], of `most` each. */
export function lying(plot, ranks, { most, words }) {
  const [pitch, label] = [22, 60];
  const width = Math.max(plot.clientWidth, 160);
  const height = ranks.length * pitch;
  const chart = element("svg", { role: "img", "aria-label": words, width, height, viewBox: `0 0 ${width} ${height}` });
  ranks.forEach((rank, i) => {
    const y = i * pitch;
    const full = width - label - SPACE.right;
    const shape = { x: label, y: y + 4, height: pitch - 8 };
    chart.append(
      text(0, y + 15, rank.label),
      element("rect", { ...shape, class: "room", width: full }),
      titled(element("rect", { ...shape, class: "held", width: (rank.value / Math.max(most, 1)) * full }), rank.title),
    );
  });
  plot.replaceChildren(chart);
}
