"""Owns the order of `kvring doctor`: what is looked at, who is asked what, and the exit code."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tools.client import Client, Json, ServerError
from tools.doctor.checks import Check, Level, See, as_json, fail, ok, show, warn
from tools.doctor.local import (
    RECORD_BYTES,
    STATE_BYTES,
    disk_check,
    files_check,
    memory_checks,
    model_check,
    python_check,
    torch_checks,
)
from tools.doctor.measured import measured_checks
from tools.doctor.packages import package_checks
from tools.doctor.places import is_own, own_stages, place_checks, places_of, taken
from tools.doctor.secrets import api_checks, key_checks
from tools.errors import ToolError
from tools.measuring import Measured, ask, join
from tools.pull import DEFAULT_MODEL, resolve_model
from tools.security import trust_of_coordinator
from transport.config import OFF, Config, ConfigError, Limits, Ring, Stage, load
from transport.frame import StageState
from transport.link import LinkError

UP_HTTP = "127.0.0.1:8000"  # as `kvring up` has it
UP_STAGES = 3


@dataclass(slots=True)
class Answers:
    """What a ring's processes said. states: (state, detail) by stage, of those heard of."""

    coordinator: bool = False
    bound: list[str] = field(default_factory=list)  # rings whose coordinator this process was
    states: dict[str, tuple[str, str]] = field(default_factory=dict)
    measured: dict[str, Measured] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)  # what kept from asking
    asked: bool = True  # False: whoever runs, none of them could be asked

    @property
    def anybody(self) -> bool:
        """True where some process of the ring runs."""
        return self.coordinator or bool(self.states)


def run_doctor(
    *,
    ring: Path | None,
    url: str | None,
    api_key: str | None,
    api_key_file: Path | None,
    record: Path | None,
    insecure: bool,
    json_wanted: bool,
) -> int:
    """Print every check; 0 when none failed, else 1."""
    checks = [python_check(), *package_checks()]
    if ring is None:
        checks += _bare()
    else:
        try:
            config = load(ring)
        except (ConfigError, OSError) as error:
            checks.append(fail("ring.toml", str(error), "docs/ring-toml.md has every key"))
        else:
            checks.append(ok("ring.toml", f"{ring}: {_rings(config)}"))
            checks += _ring(config, ring, url, api_key, api_key_file, insecure=insecure)
    if record is not None:
        checks.append(disk_check("frame logs", record, RECORD_BYTES, "a process's frame logs"))
    if json_wanted:
        print(json.dumps(as_json(checks), indent=2, ensure_ascii=False))
    else:
        show(checks, sys.stdout)
    return int(any(check.level is Level.FAIL for check in checks))


def _rings(config: Config) -> str:
    return ", ".join(f"ring {ring.name} of {len(ring.stages)} stages" for ring in config.rings)


# ---- without a ring.toml: what `kvring up` would need --------------------------------------------


def _bare() -> Iterator[Check]:
    yield from torch_checks(None)
    yield from _default_model()
    why = taken(UP_HTTP)
    if why is None:
        yield ok("http", f"{UP_HTTP} is free to bind")
    else:
        advice = "stop what listens there, or kvring up --http 127.0.0.1:PORT"
        yield fail("http", f"{UP_HTTP}: {why.strerror or why}", advice, See.PORT)
    yield files_check(Limits().connections)
    yield disk_check("state", Path.cwd(), STATE_BYTES, "models and logs")


def _default_model() -> Iterator[Check]:
    try:
        path = str(resolve_model(DEFAULT_MODEL, Path("models")))
    except ToolError as error:
        yield warn("model", error.message, "or kvring up --model toy needs no file", See.MODEL)
        return
    found = model_check(path, "bfloat16")
    yield found.check
    if found.need is not None:
        total = found.need.layers_total
        cuts = [total * index // UP_STAGES for index in range(UP_STAGES + 1)]
        stages = [Stage(f"s{i}", "", (cuts[i], cuts[i + 1])) for i in range(UP_STAGES)]
        yield from memory_checks(stages, Limits(max_model_len=8192), found.need, ())


# ---- with one ------------------------------------------------------------------------------------


def _ring(
    config: Config,
    file: Path,
    url: str | None,
    api_key: str | None,
    api_key_file: Path | None,
    *,
    insecure: bool,
) -> Iterator[Check]:
    mine = [stage for ring in config.rings for stage in own_stages(ring)]
    coordinator_here = any(is_own(ring.verdicts) for ring in config.rings)
    threads = max((stage.threads for stage in mine if stage.device == "cpu"), default=0)
    yield from torch_checks(threads or None, [stage.device for stage in mine])
    model = config.model
    found = model_check(model.path, model.dtype, model.weights, model.kv)
    yield found.check
    if config.coordinator.draft_model is not None and coordinator_here:
        draft = model_check(config.coordinator.draft_model, config.model.dtype).check
        yield replace(draft, what="draft model")
    yield from key_checks(config, insecure=insecure)
    yield from api_checks(config.coordinator.http, api_key_file)
    answers = _ask(config, url, api_key)
    yield from answers.checks
    if not answers.coordinator and url is None and is_own(config.coordinator.http):
        yield _http(config.coordinator.http)
    answering = dict(_answering(config, answers))
    bound = {f"coordinator {name}" for name in answers.bound}
    places = places_of(config)
    yield from place_checks(places, answering, bound, anybody=answers.anybody, asked=answers.asked)
    if found.need is not None:
        yield from memory_checks(mine, config.limits, found.need, tuple(answers.states))
    yield files_check(config.limits.connections if coordinator_here else None)
    if coordinator_here and config.coordinator.state != OFF:
        state = config.coordinator.state
        folder = Path(state).parent if state else file.parent / ".kvring"
        yield disk_check("state", folder, STATE_BYTES, "what is resident")
    for ring in config.rings:
        if ring.name in answers.measured:
            yield from measured_checks(config, ring, answers.measured[ring.name])


def _http(address: str) -> Check:
    why = taken(address)
    if why is None:
        return ok("http", f"{address} is free to bind")
    advice = "stop what listens there, or choose another [coordinator] http"
    return fail("http", f"{address}: {why.strerror or why}", advice, See.PORT)


def _answering(config: Config, answers: Answers) -> Iterator[tuple[str, Check]]:
    """The line of every process that was heard of, by what it is."""
    for ring in config.rings:
        if answers.coordinator:
            what = f"coordinator {ring.name}"
            yield what, ok(what, f"{ring.verdicts} answers")
        for stage in ring.stages:
            if stage.name in answers.states:
                what = f"stage {stage.name}"
                yield what, _state(what, stage.address, *answers.states[stage.name])


def _state(what: str, address: str, state: str, detail: str) -> Check:
    if state == StageState.READY:
        return ok(what, f"{address} answers, ready")
    if state == StageState.LOADING:
        return warn(
            what, f"{address} answers, loading: {detail}", "run this again when it is ready"
        )
    return fail(what, f"{address} says {state}: {detail}", "its own log says more", See.STAGE)


def _ask(config: Config, url: str | None, api_key: str | None) -> Answers:
    """The coordinator, where one runs; else the stages."""
    base = url or f"http://{config.coordinator.http}".replace("//0.0.0.0:", "//127.0.0.1:")
    with Client(base, api_key) as client:
        try:
            state = client.ready()
        except ToolError as error:
            if url is not None:
                answers = Answers(asked=False)
                answers.checks.append(fail("coordinator", error.message, "", See.SERVER))
                return answers
        else:
            return _ask_coordinator(config, client, state.detail)
    return _join(config)


def _ask_coordinator(config: Config, client: Client, missing: str) -> Answers:
    answers = Answers(coordinator=True)
    try:
        said = client.get("/ring")
    except ServerError as error:
        answers.asked = False
        advice = "give its --api-key, one that is marked admin"
        answers.checks.append(fail("coordinator", error.message, advice, See.KEYS))
        return answers
    served = {each["name"]: each for each in said.get("rings", ())}
    for ring in config.rings:
        if ring.name not in served:
            text = f"{client.url} serves {', '.join(served)}, not {ring.name}"
            advice = "another server listens there: give --url, or stop it"
            answers.checks.append(fail(f"ring {ring.name}", text, advice, See.PORT))
            continue
        answers.states |= _heard(served[ring.name], config.limits.lost_after_s)
        answers.checks.append(_served(served[ring.name], missing))
        if all(stage.name in answers.states for stage in ring.stages):
            _measure(answers, client, ring)
    return answers


def _heard(ring: Json, lost_after_s: float) -> dict[str, tuple[str, str]]:
    """Stages that said something lately, or that said last that they have failed."""
    return {
        stage["name"]: (stage["state"], stage["detail"])
        for stage in ring["stages"]
        if stage["state"] == StageState.FAILED
        or (stage["state"] != "unknown" and stage["heartbeat_age_s"] < lost_after_s)
    }


def _served(ring: Json, missing: str) -> Check:
    what = f"ring {ring['name']}"
    if ring["state"] == "ready":
        exact = "exact" if ring.get("exact") else "not exact to the bit"
        return ok(what, f"the coordinator says it is ready, {exact}")
    detail = ring["detail"] or missing
    see = See.WEIGHTS if "different weights" in detail else See.STAGE
    return fail(what, f"{ring['state']}: {detail}", "", see)


def _measure(answers: Answers, client: Client, ring: Ring) -> None:
    try:
        answers.measured[ring.name] = ask(client, ring.name)
    except ServerError as error:
        level = warn if error.status in {403, 409} else fail
        todo = {
            403: "give an --api-key that is marked admin",
            409: "run this again when no turn does",
        }.get(error.status, "")
        see = None if error.status == 409 else See.STAGE
        answers.checks.append(level(f"measure {ring.name}", error.message, todo, see))
    except ToolError as error:
        answers.checks.append(fail(f"measure {ring.name}", error.message, "", See.STAGE))


def _join(config: Config) -> Answers:
    """No coordinator runs: be it for a moment, ring by ring."""
    answers = Answers()
    try:
        trust = trust_of_coordinator(config)
    except ToolError as error:
        answers.asked = False
        answers.checks.append(warn("measure", f"without its key: {error.message}", "", See.KEYS))
        return answers
    for ring in config.rings:
        what = f"measure {ring.name}"
        said = "none of its processes runs: clocks, links and speeds can't be told yet"
        nobody = warn(what, said, "start them and run this again")
        if all(is_own(stage.address) and taken(stage.listen) is None for stage in ring.stages):
            answers.checks.append(nobody)
            continue
        try:
            heard = join(config, ring, trust)
        except LinkError as error:
            answers.asked = False
            answers.checks.append(_unbound(config, ring, error))
            continue
        answers.bound.append(ring.name)
        answers.states |= {
            name: (beat.state.value, beat.detail) for name, beat in heard.beats.items()
        }
        if heard.measured is not None:
            answers.measured[ring.name] = heard.measured
        elif heard.beats:
            answers.checks.append(fail(what, heard.fault, "see the lines below", See.STAGE))
        else:
            answers.checks.append(nobody)
    return answers


def _unbound(config: Config, ring: Ring, error: LinkError) -> Check:
    """Why this process could not be the ring's coordinator for a moment, and what to do."""
    what = f"measure {ring.name}"
    why = taken(ring.listen) if is_own(ring.verdicts) else None
    if why is None or why.errno != errno.EADDRINUSE:
        advice = "run this on the coordinator's machine, or give its --url"
        return warn(what, str(error), advice)
    said = f"{ring.listen} is taken, and nobody answers at http://{config.coordinator.http}"
    advice = "if a coordinator runs with another --http, give that as --url http://HOST:PORT; "
    advice += "else stop what listens there (ss -ltnp), or choose another port"
    return fail(what, said, advice, See.PORT)
