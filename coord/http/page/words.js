// Owns how numbers and reasons are put into words.

const THIN = "\u202f"; // narrow, and no place for a line to break

export function count(value) {
  return value === null || value === undefined
    ? "–"
    : String(value).replace(/\B(?=(\d{3})+$)/g, THIN);
}

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10) return `${value.toFixed(1)} ms`;
  return value < 1000
    ? `${Math.round(value)} ms`
    : `${(value / 1000).toFixed(value < 10000 ? 2 : 1)} s`;
}

export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value < 10 ? value.toFixed(1) : String(Math.round(value));
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${Math.round(share * 100)} %`;
}

export function bytes(value) {
  if (!value) return "";
  return value < 1e9 ? `${Math.round(value / 1e6)} MB` : `${(value / 1e9).toFixed(1)} GB`;
}

const REASONS = {
  new: "what follows is new",
  edited: "another text stands there",
  template: "the same text, in other tokens",
  salt: "another cache salt",
  evicted: "given up for another prompt",
  replaced: "overwritten by another branch",
  parked: "parked, and not brought back",
  "parked too long": "was parked for too long",
  ttl: "given up after being idle",
  request: "given up on request",
  "self-check": "given up for the ring's self-check",
  "ring lost": "a stage lost it",
  refused: "a stage refused it",
  "busy ring": "it is on a ring that was busy",
  "reuse off": "reuse was switched off",
};

export function reason(miss) {
  if (!miss) return "";
  return `Reuse ended at token ${count(miss.position)}: ${REASONS[miss.reason] || miss.reason}.`;
}
