"""The page at / in a real headless Chromium, against a real ring of toys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests import processes
from tests.browser import Tab, chromium
from tests.processes import get, post

LONG = 3000  # tokens of a reply that is still written when the test does something
DASH = "\u2013"
VIEWS = ("chat", "ring", "list")
SCRIPTED = """Here is **it**, with `code` and <b>no markup</b>:

```python
print("<img src=x onerror=alert(1)>")
```

1. one
2. [two](javascript:alert(1))
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def url(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One ring for all tests; after the browser, so that none is started where that is missing."""
    with processes.fleet(tmp_path_factory.mktemp("page")) as made:
        _, base = made.up("--model", "toy", "--slots", "4")
        made.ready(base)
        yield base


@pytest.fixture
def tab(browser: Browser, url: str) -> Iterator[Tab]:
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    found = Tab(context, url)
    yield found
    found.check()
    context.close()


def reports(tab: Tab) -> list[dict[str, Any]]:
    """The last chunk of each reply: usage and the kvring object, as the server sent them."""
    found = tab.page.evaluate("window.replies")
    lines = [[line for line in text.split("\n") if line.startswith("data: {")] for text in found]
    return [json.loads(each[-1].removeprefix("data: ")) for each in lines]


def metric(url: str, name: str) -> float:
    lines = get(f"{url}/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"kvring:{name} "))


def resident(url: str, slot: int) -> int:
    slots = get(f"{url}/ring").json()["rings"][0]["slots"]
    return int(slots[slot]["resident"])


def empty(url: str) -> None:
    """Give every slot up."""
    processes.idle(url)
    for slot in processes.slots(url):
        httpx.delete(f"{url}/ring/slots/{slot['slot']}", verify=processes.NO_TLS)


# ---- talking -------------------------------------------------------------------------------------


def test_two_turns_and_their_numbers(tab: Tab, url: str) -> None:
    """The page, the response's kvring object, /metrics and /ring say the same."""
    names = [
        "prompt_tokens_total",
        "prefix_cache_hits_total",
        "generation_tokens_total",
        "drafts_accepted_total",
        "drafts_rejected_total",
    ]
    before = {name: metric(url, name) for name in names}
    tab.open()
    tab.say("Tell me something long enough to be worth keeping in a slot.")
    tab.say("And then?")
    said = reports(tab)
    for cost, chunk in zip(tab.costs(), said, strict=True):
        report, usage = chunk["kvring"], chunk["usage"]
        assert cost["cached"] == str(report["matched"])
        assert cost["cached"] == str(usage["prompt_tokens_details"]["cached_tokens"])
        assert cost["prefilled"] == str(report["prefilled"])
        assert float(cost["tokens/s"]) == pytest.approx(report["tokens_per_s"], rel=0.05)
        first = float(cost["first token"].removesuffix(" ms"))
        assert first == pytest.approx(report["ttft_ms"], rel=0.06, abs=0.5)
        judged = report["drafts_accepted"] + report["drafts_rejected"]
        assert cost["drafts"] == (f"{report['drafts_accepted']}/{judged}" if judged else DASH)
    assert said[0]["kvring"]["matched"] == 0
    assert said[1]["kvring"]["matched"] > 0
    assert said[1]["kvring"]["cold_ms"] > 0, "the first turn has timed a prefill"
    more = {name: metric(url, name) - before[name] for name in names}
    assert more == {
        "prompt_tokens_total": sum(each["usage"]["prompt_tokens"] for each in said),
        "prefix_cache_hits_total": sum(each["kvring"]["matched"] for each in said),
        "generation_tokens_total": sum(each["usage"]["completion_tokens"] for each in said),
        "drafts_accepted_total": sum(each["kvring"]["drafts_accepted"] for each in said),
        "drafts_rejected_total": sum(each["kvring"]["drafts_rejected"] for each in said),
    }
    slot = said[1]["kvring"]["slot"]
    rows = resident(url, slot)
    assert rows == said[1]["usage"]["total_tokens"] - 1
    shown = tab.page.locator(f".slot[data-slot='{slot}']")
    expect(shown).to_have_attribute("data-resident", str(rows))
    expect(shown.locator(".slot-owner")).to_have_text(tab.stored()[0]["title"])
    expect(tab.page.locator("#turns tbody tr")).to_have_count(2)
    expect(tab.page.locator("#plot .first.swatch")).to_be_visible()
    expect(tab.page.locator("#plot rect.cold")).to_have_count(
        sum(each["kvring"]["cold_ms"] is not None for each in said)
    )


def test_a_reply_streams_and_escape_stops_it(tab: Tab, url: str) -> None:
    tab.open(longest=LONG)
    tab.begin("Go on and on.")
    running = tab.page.locator(".running .body")
    tab.page.wait_for_function(
        "() => (document.querySelector('.running .body')?.textContent.length ?? 0) > 80"
    )
    early = len(running.inner_text())
    expect(tab.page.locator(".slot.writing")).to_have_count(1)
    expect(tab.page.locator("#state")).to_contain_text("running")
    tab.page.keyboard.press("Escape")
    tab.settle()
    [text] = tab.texts("model")
    assert len(text) >= early, "what came stays"
    [report] = reports(tab)
    assert report["kvring"]["ended_by"] == "cancelled"
    assert report["usage"]["completion_tokens"] < LONG
    expect(tab.page.locator(".note")).to_have_text("Stopped.")
    assert tab.costs()[0]["prefilled"] == str(report["kvring"]["prefilled"])
    processes.idle(url)
    tab.page.get_by_text("Settings").click()
    tab.page.get_by_label("Longest reply").fill("5")
    tab.say("Now a short word?")
    assert reports(tab)[-1]["usage"]["completion_tokens"] == 5
    tab.page.locator("#announcer").get_by_text("Reply complete").wait_for(state="attached")


def test_an_edited_message_forks_the_conversation(tab: Tab) -> None:
    tab.open()
    beginning = "A long beginning that both branches share, word for word, as far as it goes. "
    tab.say(beginning)
    tab.say("one")
    tab.say("two")
    assert len(tab.texts("mine")) == 3
    tab.page.get_by_role("button", name="Edit this message").nth(1).click()
    box = tab.page.get_by_label("Your message, edited")
    expect(box).to_be_focused()
    box.fill("another one")
    box.press("Enter")
    tab.settle()
    assert [text.strip() for text in tab.texts("mine")] == [beginning.strip(), "another one"]
    report = reports(tab)[-1]["kvring"]
    assert report["matched"] >= len(beginning), "what comes before the edit is resident"
    assert tab.stored()[0]["turns"][-1]["kind"] == "edited"
    assert tab.costs()[-1]["cached"] == str(report["matched"])


def test_a_regenerated_reply_takes_the_old_ones_place(tab: Tab) -> None:
    tab.open()
    tab.say("Roll a die, many times over, and say what came.")
    [before] = tab.texts("model")
    tab.page.get_by_role("button", name="Another reply in this one's place").click()
    tab.settle()
    [after] = tab.texts("model")
    assert after != before, "another seed"
    first, second = (each for each in reports(tab))
    prompt = second["usage"]["prompt_tokens"]
    assert prompt == first["usage"]["prompt_tokens"]
    assert second["kvring"]["matched"] == prompt - 1, "all of the prompt is resident"
    expect(tab.page.locator("#turns tbody tr").first).to_contain_text("again")


def test_conversations_survive_a_reload_and_own_their_slots(tab: Tab, url: str) -> None:
    other = "Another conversation, quite different."
    empty(url)  # else one-turn conversations may push each other out
    tab.open()
    tab.say("The first conversation.")
    tab.page.get_by_role("button", name="New conversation").click()
    tab.say(other)
    body = {"messages": [{"role": "user", "content": "somebody else asks"}], "max_tokens": 5}
    post(f"{url}/v1/chat/completions", json=body)
    tab.page.reload()
    names = tab.page.locator("#conversations .entry")
    expect(names).to_have_text(
        ["Another conversation, quite different.", "The first conversation."]
    )
    names.nth(1).click()
    assert tab.texts("mine") == ["The first conversation."]
    assert len(tab.costs()) == 1
    tab.page.wait_for_selector("#state[data-kind=good]")
    own = tab.page.locator(".slot:not(.others)")
    expect(own).to_have_count(2)
    colours = own.locator(".fill").evaluate_all(
        "(all) => all.map((each) => getComputedStyle(each).backgroundColor)"
    )
    assert len(set(colours)) == 2
    expect(tab.page.locator(".slot.current .slot-owner")).to_have_text("The first conversation.")
    expect(tab.page.locator(".slot.others").filter(has_text="other clients").first).to_be_visible()
    tab.page.get_by_role("button", name="Delete The first conversation.").click()
    assert [each["title"] for each in tab.stored()] == [other]


def test_a_reply_is_text_and_never_markup(tab: Tab) -> None:
    tab.open()
    delta = {"choices": [{"index": 0, "delta": {"content": SCRIPTED}, "finish_reason": None}]}
    tab.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            headers={"content-type": "text/event-stream"},
            body=f"data: {json.dumps(delta)}\n\ndata: [DONE]\n\n",
        ),
    )
    tab.say("hello <i>you</i>")
    assert tab.texts("mine") == ["hello <i>you</i>"]
    body = tab.page.locator(".message.model .body")
    expect(body.locator("pre code")).to_have_text('print("<img src=x onerror=alert(1)>")')
    expect(body.locator("strong")).to_have_text("it")
    expect(body.locator("ol > li")).to_have_text(["one", "[two](javascript:alert(1))"])
    expect(body.locator("img, b, a, script")).to_have_count(0)


def test_a_failed_turn_says_why_and_can_be_tried_again(tab: Tab) -> None:
    tab.open()
    error = {"error": {"message": "the ring was lost", "code": "ring_lost", "param": None}}
    tab.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            headers={"content-type": "text/event-stream"},
            body=f"event: error\ndata: {json.dumps(error)}\n\ndata: [DONE]\n\n",
        ),
        times=1,
    )
    tab.say("hello")
    expect(tab.page.get_by_role("alert")).to_have_text("the ring was lost")
    tab.page.get_by_role("button", name="Another reply").click()
    tab.settle()
    expect(tab.page.get_by_role("alert")).to_have_count(0)
    assert len(tab.costs()) == 1


# ---- keys ----------------------------------------------------------------------------------------


def test_a_server_with_keys_is_asked_with_one(browser: Browser, tmp_path: Path) -> None:
    with processes.fleet(tmp_path) as made:
        _, base = made.up("--model", "toy", "--slots", "2", "--api-key", "open-sesame")
        made.ready(base)
        context = browser.new_context()
        tab = Tab(context, base)
        tab.page.goto(base)
        box = tab.page.get_by_role("textbox", name="API key")
        expect(box).to_be_focused()
        tab.check()  # no error before a key was tried
        tab.expected = ("401",)
        box.fill("wrong")
        box.press("Enter")
        expect(tab.page.locator("#key-text")).to_contain_text("does not know that key")
        box.fill("open-sesame")
        box.press("Enter")
        tab.page.wait_for_selector("#state[data-kind=good]")
        tab.say("hello")
        assert len(tab.costs()) == 1
        tab.page.reload()
        tab.page.wait_for_selector("#state[data-kind=good]")
        assert "open-sesame" not in tab.page.evaluate("JSON.stringify(localStorage)")
        assert "open-sesame" not in tab.page.url
        tab.check()
        context.close()


# ---- for everybody -------------------------------------------------------------------------------


def findings(tab: Tab) -> list[str]:
    """What axe finds that is serious or critical."""
    script = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    tab.page.evaluate(script)
    found = tab.page.evaluate("axe.run()")["violations"]
    return [
        f"{each['id']}: {node['html'][:120]}"
        for each in found
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(scheme: Any, tab: Tab) -> None:
    tab.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    tab.open()
    ground = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    levels = [int(part) for part in ground.removeprefix("rgb(").removesuffix(")").split(",")]
    assert (max(levels) < 64) if scheme == "dark" else (min(levels) > 192)
    assert findings(tab) == []
    tab.say("a `code` and\n\n```\na block\n```\n")
    tab.say("more")
    tab.page.get_by_role("button", name="Another reply").last.click()
    tab.settle()
    tab.page.get_by_text("Settings").click()
    assert findings(tab) == []
    tab.page.set_viewport_size({"width": 360, "height": 740})
    for view in VIEWS:
        tab.page.click(f"[data-show={view}]")
        assert findings(tab) == [], view


def test_a_narrow_screen_never_scrolls_sideways(tab: Tab) -> None:
    tab.page.set_viewport_size({"width": 360, "height": 640})
    tab.open()
    tab.say("unbroken" * 60 + "\n\n```\n" + "wide " * 80 + "\n```\n")
    for view in VIEWS:
        tab.page.click(f"[data-show={view}]")
        part = {"chat": ".chat", "ring": ".ring", "list": ".list"}[view]
        expect(tab.page.locator(part)).to_be_visible()
        for place in ("html", "#scroller", ".ring", ".list"):
            wide, fits = tab.page.locator(place).evaluate("(e) => [e.scrollWidth, e.clientWidth]")
            assert wide <= fits, (view, place)
    tab.page.click("[data-show=chat]")
    tab.say("It can be used like this, too.")
    assert len(tab.costs()) == 2


def test_it_works_with_the_keyboard_alone(tab: Tab) -> None:
    tab.open()
    tab.page.keyboard.press("Tab")
    expect(tab.page.locator(".skip")).to_be_focused()
    tab.page.keyboard.press("Enter")
    expect(tab.page.locator("#prompt")).to_be_focused()
    tab.page.keyboard.type("first line")
    tab.page.keyboard.press("Shift+Enter")
    tab.page.keyboard.type("second line")
    tab.page.keyboard.press("Enter")
    tab.settle()
    assert tab.texts("mine") == ["first line\nsecond line"]
    tab.page.keyboard.press("Shift+Tab")  # from the box back to the last reply's buttons
    expect(tab.page.locator(".actions button").last).to_be_focused()


def test_the_live_view_follows_the_ring(tab: Tab, url: str) -> None:
    """Without a turn of its own: what others do is seen, and a slot that is given up is empty."""
    tab.open()
    body = {"messages": [{"role": "user", "content": "x" * 300}], "max_tokens": 5}
    slot = post(f"{url}/v1/chat/completions", json=body).json()["kvring"]["slot"]
    processes.idle(url)
    shown = tab.page.locator(f".slot[data-slot='{slot}']")
    expect(shown).to_have_attribute("data-resident", str(resident(url, slot)))
    empty(url)
    expect(shown).to_have_attribute("data-resident", "0")
    expect(shown.locator(".slot-owner")).to_have_text("empty")
    stages = get(f"{url}/ring").json()["rings"][0]["stages"]
    for stage in stages:
        row = tab.page.locator(f"tr[data-stage='{stage['name']}']")
        low, high = stage["layers"]
        expect(row.locator("td").first).to_have_text(f"{low}{DASH}{high - 1}")
