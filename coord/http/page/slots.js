// Owns the slots' bars: how much of each is resident, and whose it is.

import { make } from "./dom.js";
import * as words from "./words.js";

// mine(session): the conversation that the server calls so, or undefined. current: the one shown.
export function slotList(ring, mine, current) {
  const slots = ring.slots.map((slot) =>
    row(`Slot ${slot.slot}`, slot, slot.capacity, mine, current),
  );
  const parked = ring.parked.map((held) =>
    row("Parked", held, ring.slots[0]?.capacity, mine, current),
  );
  return make("ul", { class: "slots" }, ...slots, ...parked);
}

function row(name, held, capacity, mine, current) {
  const owner = held.session ? mine(held.session) : undefined;
  const resident = held.resident ?? 0;
  const writing = held.turn !== null && held.turn !== undefined;
  const hidden = held.resident === undefined && held.occupied; // another tenant's
  const words_ = hidden
    ? "another key's"
    : owner
      ? owner.title
      : resident || writing
        ? "other clients"
        : "empty";
  const fill = make("div", { class: "fill" });
  fill.style.setProperty("--share", hidden ? 1 : Math.min(1, resident / Math.max(1, capacity)));
  const item = make(
    "li",
    {
      class: `slot ${owner ? `c${owner.colour}` : "others"}`,
      "data-slot": held.slot,
      "data-resident": resident,
    },
    make(
      "div",
      { class: "slot-line" },
      make("span", { class: "slot-name", text: name }),
      make("span", { class: "slot-owner", text: words_ }),
      writing ? make("span", { class: "badge", text: "writing" }) : null,
      held.kept_s > 0 ? make("span", { class: "badge", text: "kept" }) : null,
      make("span", {
        class: "slot-rows",
        text: hidden ? "" : `${words.count(resident)} / ${words.count(capacity)}`,
      }),
    ),
    make("div", { class: "track", "aria-hidden": "true" }, fill),
  );
  if (writing) item.classList.add("writing");
  if (hidden) item.classList.add("hidden-rows");
  if (owner && owner === current) item.classList.add("current");
  return item;
}
