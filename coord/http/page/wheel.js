// Owns the picture of one ring: the coordinator on top, its stages clockwise, frames on their way.
//
// Frames take milliseconds and the server tells their number twice a second, so the dots move at the
// pace that the numbers give (frames in flight by frames per second, Little 1961), slowed down to
// what an eye can follow.

import { makeSvg } from "./dom.js";
import * as words from "./words.js";

const RADIUS = 92;
const LANE = 70; // of the frames
const GAP = 0.3; // radians left free for the coordinator, to each side of the top
const BETWEEN = 0.05; // radians between two stages
const ROUND_S = [1.2, 6]; // bounds of a shown round trip
const MAX_DOTS = 32;

export class Wheel {
  constructor() {
    this._stages = makeSvg("g");
    this._dots = makeSvg("g", { class: "dots" });
    this._flying = makeSvg("text", { class: "big", "text-anchor": "middle", y: 2 });
    this._rate = makeSvg("text", { class: "small", "text-anchor": "middle", y: 38 });
    this.element = makeSvg(
      "svg",
      { viewBox: "-186 -130 372 264", class: "wheel", role: "img" },
      makeSvg("circle", { r: LANE, class: "lane" }),
      this._stages,
      this._dots,
      makeSvg("circle", { cy: -RADIUS, r: 13, class: "hub" }),
      makeSvg("text", {
        y: -RADIUS - 20,
        class: "small",
        "text-anchor": "middle",
        text: "coordinator",
      }),
      this._flying,
      makeSvg("text", { class: "small", "text-anchor": "middle", y: 20, text: "frames in flight" }),
      this._rate,
    );
    this._round = ROUND_S[0];
    this._turn = 0; // how far the first dot is, 0..1
    this._last = null;
    this._still = matchMedia("(prefers-reduced-motion: reduce)");
  }

  // perSecond: frames that came back.
  show(ring, perSecond) {
    const flying = ring.frames_in_flight;
    this._flying.textContent = String(flying);
    this._rate.textContent = `${words.rate(perSecond)} a second`;
    const [least, most] = ROUND_S;
    this._round = perSecond ? Math.min(most, Math.max(least, (20 * flying) / perSecond)) : most;
    this._stages.replaceChildren(...arcs(ring.stages));
    this.element.setAttribute("aria-label", summary(ring, perSecond));
    this._setDots(Math.min(flying, MAX_DOTS));
  }

  _setDots(wanted) {
    const dots = this._dots;
    while (dots.childElementCount > wanted) dots.lastElementChild.remove();
    while (dots.childElementCount < wanted) dots.append(makeSvg("circle", { r: 5, class: "dot" }));
    this._place();
    if (wanted && this._last === null && !this._still.matches) {
      this._last = performance.now();
      requestAnimationFrame((now) => this._move(now));
    }
  }

  _move(now) {
    if (!this._dots.childElementCount || !this.element.isConnected) {
      this._last = null;
      return;
    }
    this._turn = (this._turn + Math.max(0, now - this._last) / 1000 / this._round) % 1;
    this._last = now;
    this._place();
    requestAnimationFrame((later) => this._move(later));
  }

  _place() {
    const dots = [...this._dots.children];
    dots.forEach((dot, index) => {
      const angle = 2 * Math.PI * ((this._turn + index / dots.length) % 1);
      dot.setAttribute("cx", (LANE * Math.sin(angle)).toFixed(2));
      dot.setAttribute("cy", (-LANE * Math.cos(angle)).toFixed(2));
    });
  }
}

function arcs(stages) {
  const layers = stages.map((stage) => stage.layers[1] - stage.layers[0]);
  const whole = layers.reduce((sum, each) => sum + each, 0);
  const free = 2 * Math.PI - 2 * GAP - BETWEEN * (stages.length - 1);
  let from = GAP;
  return stages.flatMap((stage, index) => {
    const to = from + (free * layers[index]) / whole;
    const middle = (from + to) / 2;
    const made = [
      makeSvg("path", { d: arc(from, to), class: "stage" }),
      makeSvg("path", {
        d: arc(from, from + (to - from) * (stage.busy_share ?? 0)),
        class: "busy",
      }),
      label(stage, middle),
    ];
    from = to + BETWEEN;
    return made;
  });
}

function label(stage, angle) {
  const side = Math.sin(angle);
  const anchor = Math.abs(side) < 0.35 ? "middle" : side > 0 ? "start" : "end";
  const away = RADIUS + 16;
  const lines = [stage.name, `layers ${stage.layers[0]}–${stage.layers[1] - 1}`];
  const x = away * side;
  const y = -away * Math.cos(angle) + (anchor === "middle" ? 4 : -4);
  return makeSvg(
    "text",
    { class: "small", "text-anchor": anchor },
    ...lines.map((text, index) =>
      makeSvg("tspan", { x, y: y + 14 * index, class: index ? "dim" : "name", text }),
    ),
  );
}

function arc(from, to) {
  const point = (angle) =>
    `${(RADIUS * Math.sin(angle)).toFixed(2)} ${(-RADIUS * Math.cos(angle)).toFixed(2)}`;
  return `M ${point(from)} A ${RADIUS} ${RADIUS} 0 ${to - from > Math.PI ? 1 : 0} 1 ${point(to)}`;
}

function summary(ring, perSecond) {
  const stages = ring.stages.map(
    (stage) => `${stage.name} ${words.percent(stage.busy_share)} busy`,
  );
  return `${ring.name}: ${stages.join(", ")}; ${ring.frames_in_flight} frames in flight, ${words.rate(perSecond)} a second`;
}
