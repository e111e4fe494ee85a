"""`kvring up`, `chat` and `status --watch` in real terminals, around one ring of toys."""

from __future__ import annotations

import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import free_ports, idle
from tests.screen import ALT_ENTER, CTRL_C, CTRL_D, ENTER, UP, Screen, pasted, terminal
from tests.toyclient import stream

BABBLE = "(?s)\ufffd.{50}\ufffd"  # random bytes: a toy's reply has come this far


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def up(state: Path) -> Iterator[tuple[Screen, str]]:
    """The ring, and the terminal that it was started in."""
    http = f"127.0.0.1:{free_ports(1)[0]}"
    options = ("--model", "toy", "--stages", "2", "--slots", "4", "--http", http)
    with terminal("up", *options, state=state) as screen:
        screen.wait_for(f"ready at http://{http}")
        yield screen, f"http://{http}"
        screen.press(CTRL_C)
        assert screen.wait() == 0, screen.text


@pytest.fixture(scope="module")
def url(up: tuple[Screen, str]) -> str:
    return up[1]


def costs(screen: Screen) -> dict[str, int]:
    """The line below the next reply."""
    found = screen.wait_for(r"cached ([\d,]+) · prefilled ([\d,]+) · first token")
    cached, prefilled = (int(number.replace(",", "")) for number in found.groups())
    return {"cached": cached, "prefilled": prefilled}


def test_up_shows_its_stages_load_and_then_what_the_ring_does(up: tuple[Screen, str]) -> None:
    screen, url = up
    before = screen.text.split("ready at")[0]
    for stage in (r"s0 +layers 0-2 .*ready +\d+ MB", r"s1 +layers 3-5 .*ready +\d+ MB"):
        assert re.search(stage, before), before
    assert "\x1b[1A" in screen.raw, "lines are rewritten in place"
    screen.wait_for(r"idle · 0 turns active")
    stream(url, "hello", 400)
    screen.wait_for(r"[1-9][\d.]* tokens/s")
    screen.wait_for(r"[1-4] of 4 slots used · [\d,]+ rows resident \(\d+%\)")
    screen.wait_for(r"busy s0 .{6} \d+% · s1 .{6} \d+%")
    screen.wait_for(r"idle · 0 turns active")


def test_pasted_lines_are_one_message_and_a_fork_keeps_the_prefix_warm(
    url: str, state: Path
) -> None:
    with terminal("chat", "--url", url, "--max-tokens", "8", state=state) as screen:
        screen.wait_for("> ")
        screen.press(pasted("first line\n/stats is no command here\n" + "many words " * 20))
        screen.press(ENTER)
        first = costs(screen)
        screen.wait_for("> ")
        screen.press(f"second{ALT_ENTER}message{ENTER}")
        second = costs(screen)
        assert second["cached"] >= first["prefilled"]
        screen.wait_for("> ")
        screen.press(f"/fork{ENTER}")
        screen.wait_for(r"1  first line /stats is no command here many words .*…")
        screen.wait_for(r"2  second message")
        screen.press(f"/fork 3{ENTER}")
        screen.wait_for("/fork 3: no such turn; give 0 to 2")
        screen.press(f"/fork 1{ENTER}")
        screen.wait_for("goes on behind turn 1")
        screen.press(f"otherwise{ENTER}")
        forked = costs(screen)
        assert forked["cached"] >= first["prefilled"], "the prefix was warm"
        screen.press(f"/stats{ENTER}")
        screen.wait_for(r"turn +cached +prefilled +first token +tokens/s +drafts")
        cached, prefilled = f"{forked['cached']:,}", f"{forked['prefilled']:,}"
        screen.wait_for(rf"2 +{cached} +{prefilled} +[\d.]+ m?s +[\d.]+ ")
        screen.wait_for(r"all +[\d,]+ \(\d+%\) +[\d,]+")
        screen.press(f"/back{ENTER}")
        screen.wait_for("back, behind turn 2; you last said: second message")
        screen.press(f"/nonsense{ENTER}")
        screen.wait_for("/nonsense: no such command; see /help")
        screen.press(f"/quit{ENTER}")
        assert screen.wait() == 0


def test_ctrl_c_ends_the_turn_at_the_server_and_keeps_what_came(url: str, state: Path) -> None:
    with terminal("chat", "--url", url, "--system", "talk", state=state) as screen:
        screen.wait_for("> ")
        screen.press(f"on and on{ENTER}")
        screen.wait_for(BABBLE)
        screen.press(CTRL_C)
        first = costs(screen)
        screen.wait_for("stopped")
        idle(url)
        screen.wait_for("> ")
        screen.press(f"and now?{ENTER}")
        screen.wait_for(BABBLE)
        screen.press(CTRL_C)
        second = costs(screen)
        assert second["cached"] > first["prefilled"] + 20, "the partial reply is resident"
        screen.wait_for("> ")
        time.sleep(0.3)  # readline shows its prompt a moment before it can be interrupted
        screen.press(CTRL_C)
        screen.wait_for("Ctrl-C again, Ctrl-D or /quit leaves")
        time.sleep(0.3)
        screen.press(CTRL_C)
        assert screen.wait() == 130


def test_what_was_typed_is_found_again_by_the_next_chat(url: str, tmp_path: Path) -> None:
    options = ("chat", "--url", url, "--max-tokens", "4")
    with terminal(*options, state=tmp_path) as screen:
        screen.wait_for("> ")
        screen.press(f"one{ALT_ENTER}two{ENTER}")
        costs(screen)
        screen.wait_for("> ")
        screen.press(CTRL_D)
        assert screen.wait() == 0
    file = tmp_path / "kvring" / "chat-history"
    assert file.read_text() == '"one\\ntwo"\n'
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    with terminal(*options, state=tmp_path) as screen:
        screen.wait_for("> ")
        screen.press(UP + ENTER)
        costs(screen)
        screen.press(f"/fork{ENTER}")
        screen.wait_for("1  one two")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_status_is_watched_in_place(url: str, state: Path) -> None:
    with terminal("status", "--url", url, "-w", "0.1", state=state, columns=60) as screen:
        screen.wait_for("toy · ready")
        screen.wait_for("toy · ready")
        screen.wait_for(r"s0 +0-2 +ready")
        before = len(screen.text)
        screen.press(CTRL_C)
        assert screen.wait() == 0
    assert "\x1b[1A" in screen.raw
    assert "\x1b[?25h" in screen.raw, "the cursor is shown again"
    assert max(len(line) for line in re.split(r"[\r\n]", screen.text[:before])) <= 60
