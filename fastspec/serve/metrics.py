"""The engine's counters for Prometheus, by vLLM's names after the prefix `fastspec:`."""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fastspec.engine.engine import Engine
from fastspec.engine.outputs import StreamEvent

_PREFIX = "fastspec:"
_GAUGES = {
    "num_requests_running": "Texts being generated.",
    "num_requests_waiting": "Texts waiting for a place in the batch.",
    "kv_cache_usage_perc": "Fraction of cache blocks in use, from 0 to 1.",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens.",
    "prompt_tokens_cached": "Prompt tokens found in the cache: shared by texts of one prompt or by"
    " prefix caching.",
    "generation_tokens": "New tokens.",
    "num_preemptions": "Times that a text lost its cache blocks and was read again.",
    "spec_decode_num_drafts": "Drafts verified.",
    "spec_decode_num_draft_tokens": "Tokens of the verified drafts.",
    "spec_decode_num_accepted_tokens": "Draft tokens accepted.",
}
_LABELLED = {
    "request_success": ("finished_reason", "Texts that have ended, by reason."),
    "spec_decode_num_accepted_tokens_per_pos": (
        "position",
        "Accepted draft tokens, by their position in the draft.",
    ),
}
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", _SHORT),
    "inter_token_latency_seconds": (
        "Between steps that produced tokens of a text; a step may produce several.",
        _SHORT,
    ),
    "request_time_per_output_token_seconds": (
        "From a text's first token to its last, divided by the tokens after the first.",
        _SHORT,
    ),
    "e2e_request_latency_seconds": ("From a request's arrival to its last token.", _LONG),
}


class ServerMetrics:
    """The engine's counters, the server's own measurements, and the page that shows them."""

    def __init__(self, engine: Engine, model: str):
        self._engine, self._model = engine, model
        self._registry = CollectorRegistry()
        self._registry.register(self)
        labels = {"labelnames": ["model_name"], "registry": self._registry}
        self.histograms = {
            name: Histogram(_PREFIX + name, text, buckets=buckets, **labels).labels(model)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self.responses = Counter(
            f"{_PREFIX}http_responses",
            "Responses, by status.",
            labelnames=["status"],
            registry=self._registry,
        )

    def collect(self) -> Iterator[Metric]:
        """The engine's counters, read when they are asked for."""
        values = self._engine.metrics()
        for kind, metrics in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text in metrics.items():
                metric = kind(_PREFIX + name, text, labels=["model_name"])
                metric.add_metric([self._model], values[name])
                yield metric
        for name, (label, text) in _LABELLED.items():
            value = values[name]
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            counter = CounterMetricFamily(_PREFIX + name, text, labels=["model_name", label])
            for key, count in pairs:
                counter.add_metric([self._model, str(key)], count)
            yield counter

    def request(self, start: float) -> "RequestTimes":
        """Times of a request that arrived at `start`, by perf_counter()."""
        return RequestTimes(self.histograms, start)

    def page(self) -> bytes:
        """All metrics in Prometheus' text form."""
        return generate_latest(self._registry)


class RequestTimes:
    """When the texts of a request got their tokens, for the histograms."""

    def __init__(self, histograms: Mapping[str, Histogram], start: float):
        self._histograms = histograms
        self._start = start
        self._first: dict[tuple[str, int], float] = {}  # by request id and index
        self._last: dict[tuple[str, int], float] = {}

    def note(self, now: float, events: Sequence[StreamEvent]) -> None:
        """Record what a step added, and when."""
        texts = {(event.request_id, event.index) for event in events if event.token_ids}
        if texts and not self._first:
            self._observe("time_to_first_token_seconds", now - self._start)
        for text in texts:
            if text in self._last:
                self._observe("inter_token_latency_seconds", now - self._last[text])
            self._first.setdefault(text, now)
            self._last[text] = now
        for output in (event.output for event in events if event.output is not None):
            text, num_later = (output.request_id, output.index), len(output.token_ids) - 1
            if num_later > 0:
                seconds = self._last[text] - self._first[text]
                self._observe("request_time_per_output_token_seconds", seconds / num_later)

    def end(self, now: float) -> None:
        """Record that all texts have ended."""
        self._observe("e2e_request_latency_seconds", now - self._start)

    def _observe(self, name: str, seconds: float) -> None:
        self._histograms[name].observe(seconds)
