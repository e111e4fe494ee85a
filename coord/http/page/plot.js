// Owns the plot: each turn's time to first token inside what a cold prefill would have taken.

import { make, makeSvg } from "./dom.js";
import * as words from "./words.js";

const SHOWN = 16;
const WIDTH = 340;
const HEIGHT = 150;
const LEFT = 46;
const BOTTOM = 20;
const TOP = 8;

export function showPlot(place, turns, colour) {
  const shown = turns.filter((turn) => turn.ttft_ms !== null).slice(-SHOWN);
  if (!shown.length) {
    place.replaceChildren(
      make("p", {
        class: "faint",
        text: "A bar for each turn, beside what it would have cost cold.",
      }),
    );
    return;
  }
  const top = ceiling(Math.max(...shown.flatMap((turn) => [turn.ttft_ms, turn.cold_ms ?? 0])));
  const svg = makeSvg("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    role: "img",
    "aria-label": summary(shown),
    class: `plot c${colour}`,
  });
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
  for (const share of [0, 0.5, 1]) {
    const line = { x1: LEFT, x2: WIDTH, y1: y(top * share), y2: y(top * share), class: "grid" };
    const label = { x: LEFT - 6, y: y(top * share) + 4, class: "tick", "text-anchor": "end" };
    svg.append(
      makeSvg("line", line),
      makeSvg("text", { ...label, text: words.milliseconds(top * share).replace("0.0 ms", "0") }),
    );
  }
  const step = (WIDTH - LEFT) / Math.max(shown.length, 6);
  const wide = Math.min(26, step * 0.7);
  shown.forEach((turn, index) => {
    const x = LEFT + step * (index + 0.5);
    svg.append(...bars(turn, x, wide, y));
  });
  place.replaceChildren(svg, legend(colour));
}

function bars(turn, x, wide, y) {
  const bar = (value, width, name) =>
    makeSvg("rect", {
      x: x - width / 2,
      width,
      y: Math.min(y(value), y(0) - 1),
      height: Math.max(1, y(0) - y(value)),
      rx: 2,
      class: name,
    });
  const made = turn.cold_ms === null ? [] : [bar(turn.cold_ms, wide, "cold")];
  made.push(bar(turn.ttft_ms, wide * 0.6, "first"));
  made.push(
    makeSvg("text", {
      x,
      y: HEIGHT - 5,
      class: "tick",
      "text-anchor": "middle",
      text: turn.number,
    }),
  );
  const cold = turn.cold_ms === null ? "" : `, cold about ${words.milliseconds(turn.cold_ms)}`;
  const title = `Turn ${turn.number}: ${words.milliseconds(turn.ttft_ms)}${cold}`;
  return [makeSvg("g", {}, makeSvg("title", { text: title }), ...made)];
}

function legend(colour) {
  return make(
    "p",
    { class: `legend c${colour}` },
    make("span", { class: "swatch first" }),
    "measured ",
    make("span", { class: "swatch cold" }),
    "cold, at the ring's measured rates",
  );
}

// The next round number.
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((step) => step >= value);
}

function summary(turns) {
  const last = turns[turns.length - 1];
  const cold =
    last.cold_ms === null
      ? ""
      : `; a cold prefill would have taken about ${words.milliseconds(last.cold_ms)}`;
  return `Time to first token of ${turns.length} turns. The last: ${words.milliseconds(last.ttft_ms)}${cold}.`;
}
