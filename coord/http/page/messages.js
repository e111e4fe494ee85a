// Owns how a conversation's messages look, and the buttons on them.

import { byId, make } from "./dom.js";
import { render } from "./markdown.js";
import * as words from "./words.js";

const NEAR_END_PX = 80;

export class Messages {
  // act: {edit(index, text), again(index)}, what the buttons do.
  constructor(act) {
    this._act = act;
    this._list = byId("messages");
    this._scroller = byId("scroller");
    this._drawn = []; // what each element was made of
  }

  // running: the message that is being written, or null.
  show(conversation, running) {
    const { messages } = conversation;
    byId("welcome").hidden = messages.length > 0;
    const follow = this._atEnd() || this._conversation !== conversation;
    if (this._conversation !== conversation) {
      this._conversation = conversation;
      this._drawn = [];
      this._list.replaceChildren();
    }
    while (this._drawn.length > messages.length) {
      this._drawn.pop();
      this._list.lastElementChild.remove();
    }
    messages.forEach((message, index) => {
      const state = JSON.stringify([message, message === running, running !== null]);
      if (this._drawn[index] === state) return;
      this._drawn[index] = state;
      const element = this._element(message, index, running);
      const old = this._list.children[index];
      if (old) old.replaceWith(element);
      else this._list.append(element);
    });
    this._list.setAttribute("aria-busy", String(running !== null));
    if (follow) this._scroller.scrollTop = this._scroller.scrollHeight;
  }

  _atEnd() {
    const { scrollTop, clientHeight, scrollHeight } = this._scroller;
    return scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
  }

  _element(message, index, running) {
    const mine = message.role === "user";
    const who = make("h3", { class: "hidden", text: mine ? "You" : "Model" });
    const body = make("div", { class: "body" });
    if (mine) body.textContent = message.content;
    else body.append(...render(message.content));
    const item = make("li", { class: `message ${mine ? "mine" : "model"}` }, who, body);
    if (message === running) {
      item.classList.add("running");
      if (!message.content) body.append(make("p", { class: "faint waiting", text: "Prefilling" }));
      return item;
    }
    if (message.error)
      item.append(make("p", { class: "error", role: "alert", text: message.error }));
    if (message.note) item.append(make("p", { class: "faint note", text: message.note }));
    if (message.turn) item.append(cost(message.turn));
    if (running === null) item.append(this._buttons(message, index, item, body));
    return item;
  }

  _buttons(message, index, item, body) {
    const row = make("div", { class: "actions" });
    const button = (text, label, click) =>
      row.append(
        make("button", {
          type: "button",
          class: "quiet",
          text,
          "aria-label": label,
          on: { click },
        }),
      );
    if (message.role === "user") {
      button("Edit", "Edit this message and send it again", () =>
        this._edit(message, index, item, body),
      );
    } else {
      button(message.error ? "Try again" : "Regenerate", "Another reply in this one's place", () =>
        this._act.again(index),
      );
      if (navigator.clipboard) {
        button("Copy", "Copy this reply", () => navigator.clipboard.writeText(message.content));
      }
    }
    return row;
  }

  _edit(message, index, item, body) {
    const text = make("textarea", { "aria-label": "Your message, edited", rows: "3" });
    text.value = message.content;
    const back = () => {
      form.replaceWith(body);
      item.classList.remove("editing");
      item.querySelector("button").focus();
    };
    const send = () => {
      if (text.value.trim()) this._act.edit(index, text.value);
    };
    const form = make(
      "form",
      { class: "edit" },
      text,
      make("button", { type: "submit", class: "main", text: "Send again" }),
      make("button", { type: "button", text: "Leave it", on: { click: back } }),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      send();
    });
    text.addEventListener("keydown", (event) => {
      if (event.key === "Escape") back();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    body.replaceWith(form);
    item.classList.add("editing");
    text.focus();
  }
}

// What a turn cost, as a line under its reply.
function cost(turn) {
  const list = make("dl", { class: "cost" });
  const add = (name, value, title) =>
    list.append(
      make(
        "div",
        { title },
        make("dt", { text: name }),
        make("dd", { text: value, "data-name": name }),
      ),
    );
  add("cached", words.count(turn.cached), "Prompt tokens that were resident in the ring");
  add(
    "prefilled",
    words.count(turn.prefilled),
    words.reason(turn.miss) || "Prompt tokens that were computed",
  );
  const cold =
    turn.cold_ms === null
      ? ""
      : ` Cold it would have taken about ${words.milliseconds(turn.cold_ms)}.`;
  add(
    "first token",
    words.milliseconds(turn.ttft_ms),
    `Queued for ${words.milliseconds(turn.queue_ms)} of it.${cold}`,
  );
  add("tokens/s", words.rate(turn.tokens_per_s), `${words.count(turn.tokens)} tokens`);
  const drafts = turn.accepted + turn.rejected;
  add(
    "drafts",
    drafts ? `${turn.accepted}/${drafts}` : "–",
    "Guessed tokens that were accepted, of those judged",
  );
  const share = make("span", { class: "share" });
  share.style.setProperty("--cached", turn.cached / Math.max(1, turn.cached + turn.prefilled));
  return make(
    "div",
    { class: "cost-row" },
    make("div", { class: "split", "aria-hidden": "true" }, share),
    list,
  );
}
