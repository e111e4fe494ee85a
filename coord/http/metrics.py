"""Owns what GET /metrics says: the requests' own numbers, and the engine's at scrape time.

Names are vLLM's stems under `kvring:`. One registry for each app; nothing is global.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "kvring:"
# Seconds. A warm turn's first token takes 0.05-0.5 s here, a cold one's up to a minute over a WAN.
_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
_TURN = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_KEY = re.compile(r"(?P<name>[a-zA-Z_][a-zA-Z0-9_]*)(\{(?P<labels>[^{}]*)\})?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="([^"\\]*)"')


class Metrics:
    """Counts what requests do. counters: the engine's, name or name{label="value"} -> value."""

    def __init__(self, counters: Callable[[], Mapping[str, float]]) -> None:
        self._registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=buckets, registry=self._registry)

        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the ledger.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens that were resident.")
        self._prompt = counter("prompt_tokens", "Prompt tokens of admitted turns.")
        self._generated = counter("generation_tokens", "Tokens committed for clients.")
        self._ended = counter("request_success", "Turns that ended.", ("finished_reason",))
        self._failed = counter("request_failure", "Turns that failed, or were refused.", ("code",))
        self._ttft = histogram("time_to_first_token_seconds", "Submit to first token.", _TTFT)
        self._between = histogram("inter_token_latency_seconds", "Between tokens.", _TOKEN)
        self._whole = histogram("e2e_request_latency_seconds", "Submit to end.", _TURN)
        # The registry drops "_total" from a counter's name; the engine's keys carry it.
        owned = {metric.name.removeprefix(PREFIX) for metric in self._registry.collect()}
        self._registry.register(_EngineCollector(counters, owned))

    def admitted(self, prompt: int, matched: int) -> None:
        """A turn got its first slot."""
        self._queries.inc(prompt)
        self._hits.inc(matched)
        self._prompt.inc(prompt)

    def first_tokens(self, count: int, waited_s: float) -> None:
        """The first tokens of a turn came."""
        self._ttft.observe(waited_s)
        self._generated.inc(count)

    def more_tokens(self, count: int, waited_s: float) -> None:
        """Tokens that came together share the wait evenly."""
        self._generated.inc(count)
        for _ in range(count):
            self._between.observe(waited_s / count)

    def ended(self, reason: str, took_s: float) -> None:
        """A turn ended: stop, length or abort."""
        self._ended.labels(reason).inc()
        self._whole.observe(took_s)

    def failed(self, code: str) -> None:
        """A turn ended without a result, or was refused."""
        self._failed.labels(code).inc()

    def exposition(self) -> bytes:
        """The page, in the text format of CONTENT_TYPE."""
        return generate_latest(_WithoutCreated(self._registry))


class _WithoutCreated(CollectorRegistry):
    """A registry's view without the _created series, which double the page and say nothing here."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric


class _EngineCollector(Collector):
    def __init__(self, counters: Callable[[], Mapping[str, float]], owned: set[str]) -> None:
        self._counters = counters
        self._owned = owned

    def describe(self) -> list[Metric]:
        """Nothing before the first scrape: the engine may not run yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One family for each name, one sample for each set of labels."""
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for key, value in self._counters().items():
            match = _KEY.fullmatch(key)
            assert match is not None, key
            name = match["name"]
            if name.removesuffix("_total") in self._owned:
                continue
            labels = dict(_LABEL.findall(match["labels"] or ""))
            family = families.get(name)
            if family is None:
                make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                text = name.removesuffix("_total").replace("_", " ")
                family = families[name] = make(PREFIX + name, text, labels=list(labels))
            family.add_metric(list(labels.values()), value)
        yield from families.values()
