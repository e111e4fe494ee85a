// Owns asking for the API key.

import { useKey } from "./api.js";
import { byId } from "./dom.js";

let asking = null;

// Resolves when the person gave a key; wrong: the last one was refused.
export function askForKey(wrong) {
  asking ??= ask(wrong).finally(() => {
    asking = null;
  });
  return asking;
}

function ask(wrong) {
  const dialog = byId("key-dialog");
  byId("key-text").textContent = wrong
    ? "The server does not know that key. Try another one."
    : "It stays in this tab and is gone when you close it.";
  byId("key").value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const form = byId("key-form");
    form.addEventListener(
      "submit",
      () => {
        useKey(byId("key").value.trim());
        resolve();
      },
      { once: true },
    );
    dialog.addEventListener("cancel", (event) => event.preventDefault());
  });
}
