"""A headless Chromium for the page's tests, and what the page must never do while they run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
WAIT_MS = 60_000  # a toy's turn takes milliseconds, on busy cores some seconds
# Keeps a copy of each chat reply, as the server sent it.
KEEP_REPLIES = """
(() => {
  const plain = window.fetch;
  window.replies = [];
  window.fetch = async (path, options) => {
    const answer = await plain(path, options);
    if (String(path).endsWith("/chat/completions") && answer.ok) {
      const index = window.replies.push(null) - 1;
      answer.clone().text().then((text) => { window.replies[index] = text; }, () => {});
    }
    return answer;
  };
})();
"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's browser; the test is skipped where there is none."""
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium on this machine: `make browser`, or install the package chromium")
    with sync_playwright() as playwright:
        # --no-sandbox: its sandbox does not run as root, and CI is root.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """One tab on a server's page. expected: what the console may say, in parts of it."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.url = url
        self.page: Page = context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.page.add_init_script(KEEP_REPLIES)
        self.expected: tuple[str, ...] = ()
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._heard)
        self.page.on("request", lambda request: self._asked(request.url))

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _asked(self, url: str) -> None:
        if urlsplit(url).netloc != urlsplit(self.url).netloc:
            self.elsewhere.append(url)

    def check(self) -> None:
        """No error in the console, and no request to another origin."""
        odd = [each for each in self.errors if not any(part in each for part in self.expected)]
        assert odd == []
        assert self.elsewhere == []

    # ---- what a person does ----

    def open(self, *, longest: int = 60, temperature: float = 1.0) -> None:
        """Load the page with these settings, and wait until the ring is shown to be ready."""
        chosen = f'{{"temperature": {temperature}, "longest": {longest}}}'
        script = f"localStorage.setItem('kvring-settings', '{chosen}')"
        self.page.add_init_script(script)
        self.page.goto(self.url)
        self.page.wait_for_selector("#state[data-kind=good]")

    def begin(self, text: str) -> None:
        """Send a message; does not wait for the reply."""
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def say(self, text: str) -> None:
        """Send a message, and wait for the whole reply."""
        self.begin(text)
        self.settle()

    def settle(self) -> None:
        """Wait until no reply is being written."""
        self.page.wait_for_selector("#send:not([hidden])")
        self.page.wait_for_selector(".running", state="detached")

    # ---- what a person sees ----

    def texts(self, kind: str) -> list[str]:
        """Bodies of the messages; kind: mine or model."""
        return self.page.locator(f".message.{kind} .body").all_inner_texts()

    def costs(self) -> list[dict[str, str]]:
        """The line under each reply, by name; thousands are not set apart."""
        rows = self.page.locator(".cost").all()
        found = []
        for row in rows:
            values = row.locator("dd").all()
            found.append(
                {
                    str(each.get_attribute("data-name")): each.inner_text().replace("\u202f", "")
                    for each in values
                }
            )
        return found

    def stored(self) -> list[dict[str, Any]]:
        """The conversations as the browser keeps them."""
        script = """() => Object.entries(localStorage)
            .filter(([name]) => name.startsWith("kvring-conversation-"))
            .map(([, text]) => JSON.parse(text))"""
        found: list[dict[str, Any]] = self.page.evaluate(script)
        return found
