// Owns showing a reply's Markdown: code blocks, headings, lists, quotes, bold, italics, code.
//
// Elements are made one by one and text is only ever text, so a reply can't bring markup along.
// Links stay words: a model's address is nothing to click on.

import { make } from "./dom.js";

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|\*([^\s*][^*]*?)\*/s;

// The elements of a text.
export function render(text) {
  const lines = text.split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (fence) {
      const end = closing(lines, at + 1, fence[1]);
      blocks.push(code(lines.slice(at + 1, end).join("\n"), fence[2]));
      at = end + 1;
    } else if (!line.trim()) {
      at += 1;
    } else if (HEADING.test(line)) {
      blocks.push(inline(make("p", { class: "heading" }), HEADING.exec(line)[2]));
      at += 1;
    } else {
      const end = blockEnd(lines, at);
      blocks.push(block(lines.slice(at, end)));
      at = end;
    }
  }
  return blocks;
}

function closing(lines, from, fence) {
  for (let at = from; at < lines.length; at++) {
    if (lines[at].trim().startsWith(fence) && !lines[at].trim().slice(fence.length).trim())
      return at;
  }
  return lines.length; // still being written
}

function kindOf(line) {
  if (ITEM.test(line)) return "list";
  return line.startsWith(">") ? "quote" : "text";
}

function blockEnd(lines, from) {
  const kind = kindOf(lines[from]);
  let at = from + 1;
  while (
    at < lines.length &&
    lines[at].trim() &&
    !FENCE.test(lines[at]) &&
    !HEADING.test(lines[at])
  ) {
    const other = kindOf(lines[at]);
    if (other !== kind && !(kind === "list" && other === "text")) break;
    at += 1;
  }
  return at;
}

function block(lines) {
  const kind = kindOf(lines[0]);
  if (kind === "list") return list(lines);
  if (kind === "quote") {
    const text = lines.map((line) => line.replace(/^>\s?/, "")).join("\n");
    return inline(make("blockquote"), text);
  }
  return inline(make("p"), lines.join("\n"));
}

function list(lines) {
  const ordered = /\d/.test(ITEM.exec(lines[0])[2]);
  const first = ordered ? parseInt(ITEM.exec(lines[0])[2], 10) : null;
  const whole = make(ordered ? "ol" : "ul", {
    start: first !== null && first !== 1 ? first : null,
  });
  let text = [];
  let deep = false;
  const flush = () => {
    if (text.length)
      whole.append(inline(make("li", { class: deep ? "deep" : null }), text.join("\n")));
  };
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item) {
      flush();
      text = [item[3]];
      deep = item[1].length > 1;
    } else {
      text.push(line.trim());
    }
  }
  flush();
  return whole;
}

function inline(parent, text) {
  let rest = text;
  for (let found; (found = INLINE.exec(rest)); rest = rest.slice(found.index + found[0].length)) {
    if (found.index) parent.append(rest.slice(0, found.index));
    if (found[2] !== undefined) parent.append(make("code", { text: found[2] }));
    else if (found[4] !== undefined) parent.append(make("em", { text: found[4] }));
    else parent.append(make("strong", { text: found[3] }));
  }
  parent.append(rest);
  return parent;
}

function code(text, language) {
  const label = language || "code";
  const body = make("pre", { tabindex: "0" }, make("code", { text }));
  const head = make("div", { class: "code-head" }, make("span", { text: label }));
  if (navigator.clipboard) {
    // only on https and localhost
    const copy = () => navigator.clipboard.writeText(text);
    head.append(
      make("button", { type: "button", class: "quiet", text: "Copy", on: { click: copy } }),
    );
  }
  return make("div", { class: "code" }, head, body);
}
