// Owns the table of a conversation's turns.

import { make } from "./dom.js";
import * as words from "./words.js";

const KINDS = { new: "", edited: "edited", again: "again" };
const HEADS = [
  ["Turn", "Turn"],
  ["Cached", "Prompt tokens that were resident"],
  ["Prefilled", "Prompt tokens that were computed"],
  ["First", "Time to the first token"],
  ["tok/s", "Tokens per second after the first"],
  ["Drafts", "Drafts accepted, of those judged"],
];

export function showTurns(place, turns) {
  if (!turns.length) {
    place.replaceChildren(make("p", { class: "faint", text: "None yet." }));
    return;
  }
  const head = make(
    "tr",
    {},
    ...HEADS.map(([text, title]) => make("th", { scope: "col", text, title })),
  );
  const body = make("tbody", {}, ...[...turns].reverse().map(row));
  place.replaceChildren(make("table", {}, make("thead", {}, head), body));
}

function row(turn) {
  const drafts = turn.accepted + turn.rejected;
  const kind = KINDS[turn.kind];
  const name = make("th", { scope: "row", text: String(turn.number) });
  if (kind) name.append(" ", make("span", { class: "fork", text: kind }));
  const cells = [
    words.count(turn.cached),
    words.count(turn.prefilled),
    words.milliseconds(turn.ttft_ms),
    words.rate(turn.tokens_per_s),
    drafts ? `${turn.accepted}/${drafts}` : "–",
  ];
  return make(
    "tr",
    { title: words.reason(turn.miss) || null },
    name,
    ...cells.map((text) => make("td", { text })),
  );
}
