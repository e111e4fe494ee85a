// Owns the live panel of all rings: a wheel, a table of stages, and the slots of each.

import { byId, make } from "./dom.js";
import { slotList } from "./slots.js";
import { Wheel } from "./wheel.js";
import * as words from "./words.js";

const RATE_MS = 1500; // frames per second are counted over so long

export class RingPanel {
  constructor() {
    this._place = byId("rings");
    this._parts = new Map(); // by the ring's name
    this._seen = null;
    this._timer = setInterval(() => this._redraw(), RATE_MS); // nothing is told when nothing moves
  }

  // conversations: all of them; current: the one that is shown.
  show(seen, conversations, current) {
    this._seen = seen;
    this._conversations = conversations;
    this._current = current;
    if (seen !== null) this._redraw();
  }

  _redraw() {
    if (this._seen === null) return;
    const owners = new Map();
    for (const each of this._conversations)
      for (const session of each.sessions) owners.set(session, each);
    const rings = this._seen.rings;
    if ([...this._parts.keys()].join() !== rings.map((ring) => ring.name).join())
      this._build(rings);
    for (const ring of rings) {
      const part = this._parts.get(ring.name);
      part.wheel.show(ring, perSecond(part, ring.frames));
      const facts = `${ring.state === "ready" ? "" : `${ring.state}: `}${ring.detail}`;
      part.facts.textContent = ring.state === "ready" ? readyFacts(ring) : facts;
      part.stages.replaceChildren(...ring.stages.map(stageRow));
      const list = slotList(ring, (session) => owners.get(session), this._current);
      part.slots.replaceWith(list);
      part.slots = list;
    }
  }

  _build(rings) {
    this._parts.clear();
    this._place.replaceChildren();
    for (const ring of rings) {
      const part = {
        wheel: new Wheel(),
        facts: make("p", { class: "faint facts" }),
        stages: make("tbody"),
        slots: make("ul"),
        counted: [],
      };
      this._parts.set(ring.name, part);
      const heads = ["Stage", "Layers", "Busy", "Memory", "State"];
      const table = make(
        "table",
        { class: "stages" },
        make("caption", { class: "hidden", text: `Stages of ${ring.name}` }),
        make(
          "thead",
          {},
          make("tr", {}, ...heads.map((text) => make("th", { scope: "col", text }))),
        ),
        part.stages,
      );
      this._place.append(
        make(
          "section",
          { "aria-label": ring.name, class: "one-ring" },
          make("h2", { text: ring.name }),
          part.facts,
          part.wheel.element,
          table,
          make("h3", { text: "Slots" }),
          part.slots,
        ),
      );
    }
  }
}

function readyFacts(ring) {
  const hop = ring.hop_ms === null ? "" : `, ${ring.hop_ms.toFixed(1)} ms round the links`;
  const exact = ring.exact ? "exact: cached is cold, to the bit" : "cached is cold, up to ties";
  return `${exact}${hop}`;
}

function stageRow(stage) {
  const loading = stage.state === "loading" ? ` ${words.percent(stage.progress)}` : "";
  const bar = make("span", { class: "meter", "aria-hidden": "true" });
  bar.style.setProperty("--share", stage.busy_share ?? 0);
  return make(
    "tr",
    { title: stage.detail || null, "data-stage": stage.name },
    make("th", { scope: "row", text: stage.name }),
    make("td", { text: `${stage.layers[0]}–${stage.layers[1] - 1}` }),
    make(
      "td",
      { class: "busy-cell" },
      bar,
      make("span", { text: words.percent(stage.busy_share) }),
    ),
    make("td", { text: words.bytes(stage.rss_bytes) }),
    make("td", { text: stage.state + loading }),
  );
}

// Frames per second since RATE_MS ago or a little more.
function perSecond(part, frames) {
  const now = performance.now();
  part.counted.push([now, frames]);
  while (part.counted.length > 2 && part.counted[1][0] < now - RATE_MS) part.counted.shift();
  const [[then, before]] = part.counted;
  return now - then < 200 ? 0 : Math.max(0, ((frames - before) / (now - then)) * 1000);
}
