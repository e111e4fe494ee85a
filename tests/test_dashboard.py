"""deploy/grafana/kvring.json draws what GET /metrics has; deploy/prometheus.yml scrapes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from coord.http.keys import hold
from tests.localring import Call, LocalRing, play
from tests.promql import read

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
FROM_PROMETHEUS = {"instance", "job"}  # labels that the scrape adds


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana" / "kvring.json").read_text())
    return found


def drawn() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in drawn() for target in panel["targets"]]


def metrics_of_a_live_server() -> dict[str, set[str]]:
    """Every series' name and labels, once a turn, a refusal and an eviction have been."""
    pages: list[str] = []

    async def scene(ring: LocalRing, call: Call) -> None:
        body = {"model": "toy", "prompt": "Tell me of tides.", "max_tokens": 8}
        assert (await call("POST", "/v1/completions", body)).status_code == 200
        long = {**body, "max_tokens": 5000}
        assert (await call("POST", "/v1/completions", long)).status_code == 400
        assert (await call("DELETE", "/ring/slots/0")).status_code == 200
        ring.scheduler.rings["r0"].stats.hop_s = 0.001  # a ping comes only after 5 s
        pages.append((await call("GET", "/metrics")).text)

    play(scene)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(pages[0]):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_grafana_can_import_it() -> None:
    board = dashboard()
    assert board["uid"] == "kvring"
    assert board["title"]
    assert board["schemaVersion"] >= 36, "older ones name data sources otherwise"
    assert "id" not in board, "that is the installation's"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {each["name"] for each in board["templating"]["list"]}
    assert variables == {"datasource", "instance"}
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
    for panel in drawn():
        assert panel["title"]
        assert panel["description"]
        assert panel["targets"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        for each in (panel, *panel["targets"]):
            assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_every_metric_and_label_is_there() -> None:
    there = metrics_of_a_live_server()
    used = [each for expression in expressions() for each in read(expression)]
    assert len({each.metric for each in used}) > 20
    for each in used:
        assert each.metric in there, each.metric
        labels = (set(each.labels) | each.grouped) - FROM_PROMETHEUS
        assert labels <= there[each.metric], f"{each.metric} has no {labels - there[each.metric]}"


def test_a_legend_names_only_what_is_left_after_grouping() -> None:
    for panel in drawn():
        for target in panel["targets"]:
            grouped = set.union(*(each.grouped for each in read(target["expr"])))
            named = {part.split("}}")[0] for part in target["legendFormat"].split("{{")[1:]}
            assert named <= grouped, target


def test_counters_are_rated_and_gauges_are_not() -> None:
    for expression in expressions():
        for each in read(expression):
            total = each.metric.endswith(("_total", "_bucket"))
            ranged = f"({each.metric}{{" in expression and "rate(" in expression
            assert total is (ranged or "increase(" in expression), expression


@pytest.mark.parametrize(
    "wrong",
    [
        'sum(rate(a{b="c"}[5m])',
        "rate(a)",
        "sum(a[5m])",
        "a[5m]",
        'a{b="c"',
        "a b",
        "histogram_quantile(0.5, sum by (x) (rate(a[5m])))",
    ],
)
def test_the_reader_of_expressions_finds_mistakes(wrong: str) -> None:
    with pytest.raises(AssertionError):
        read(wrong)


def test_prometheus_scrapes_with_an_admins_key() -> None:
    yaml = pytest.importorskip("yaml")
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["authorization"]["type"] == "Bearer"
    answers: list[httpx.Response] = []

    async def scene(_: LocalRing, call: Call) -> None:
        answers.append(await call("GET", job["metrics_path"], key="a" * 20))
        answers.append(await call("GET", job["metrics_path"], key="b" * 20))

    play(scene, keys=(hold("ops", "a" * 20, admin=True), hold("bob", "b" * 20, admin=False)))
    assert [answer.status_code for answer in answers] == [200, 403]
