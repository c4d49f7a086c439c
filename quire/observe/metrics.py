"""Prometheus metrics: vLLM's names, types, labels and bucket edges, so that its boards and routers work unchanged.

Takes plain numbers and a snapshot struct handed in from above; knows no engine, no HTTP framework, no request. Each
Metrics has a registry of its own: two servers in one process do not mix. Names start with `quire_` only where vLLM has
none. Gauges and engine counters are read when scraped, so an idle server does nothing for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Protocol

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = CONTENT_TYPE_LATEST
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
WHOLE_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
CHOICES = (1, 2, 5, 10, 20)
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")  # where prompt tokens come from, in vLLM's words
LABELS = ("model_name", "engine")


class Snapshot(Protocol):
    """The engine's own counts, as `engine.types.Stats` has them."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def loading(self) -> int: ...
    @property
    def pages_total(self) -> int: ...
    @property
    def pages_used(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def prefix_queries(self) -> int: ...
    @property
    def prefix_hits(self) -> int: ...
    @property
    def loaded_tokens(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def evictions(self) -> int: ...
    @property
    def drafted_tokens(self) -> int: ...
    @property
    def accepted_tokens(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def step_bound(self) -> float: ...


def one_two_five(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, … up to `limit`."""
    edges = []
    power = 1
    while power <= limit:
        edges += [power * m for m in (1, 2, 5) if power * m <= limit]
        power *= 10
    return edges


class Metrics:
    """What the HTTP process counts by itself, from its first moment."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._models = _OfModels()
        self.registry.register(self._models)
        ProcessCollector(registry=self.registry)  # process_*: of the HTTP process; on Linux
        self._http = Counter(
            "quire_http_requests",
            "HTTP requests by route and status.",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self._http_seconds = Histogram(
            "quire_http_request_seconds", "From first byte in to last byte out.", ["route"], registry=self.registry
        )

    def http(self, route: str, method: str, status: int, seconds: float) -> None:
        """One HTTP request ended. `route` is the route's pattern, never a client's path."""
        self._http.labels(route, method, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def model(
        self,
        name: str,
        *,
        context: int,
        page_size: int,
        pages: int,
        snapshot: Callable[[], Snapshot],
        restarts: Callable[[], int] = lambda: 0,
        hangs: Callable[[], int] = lambda: 0,
    ) -> ModelMetrics:
        """Start counting for a model that became ready."""
        registry = CollectorRegistry()  # its own: each context has its own bucket edges
        registry.register(_EngineGauges(name, page_size, pages, snapshot, restarts, hangs))
        self._models.registries[name] = registry
        return ModelMetrics(registry, name, context)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)


class ModelMetrics:
    """Per-request observations of one model. A request with n choices counts each as a sequence, as vLLM does."""

    def __init__(self, registry: CollectorRegistry, name: str, context: int):
        tokens = one_two_five(context)

        def histogram(suffix: str, what: str, edges: Iterable[float]) -> Histogram:
            metric = Histogram(f"vllm:{suffix}", what, LABELS, buckets=tuple(edges), registry=registry)
            return metric.labels(name, "0")

        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN)
        self._itl = _Tally(
            "vllm:inter_token_latency_seconds", "Between one token and the next.", [name, "0"], BETWEEN_TOKENS
        )
        registry.register(self._itl)
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Decode time per output token.", BETWEEN_TOKENS
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to last token.", WHOLE_REQUEST)
        self._queue = histogram("request_queue_time_seconds", "Waiting to be scheduled.", WHOLE_REQUEST)
        self._prefill = histogram("request_prefill_time_seconds", "Scheduled to first token.", WHOLE_REQUEST)
        self._decode = histogram("request_decode_time_seconds", "First token to last.", WHOLE_REQUEST)
        self._inference = histogram("request_inference_time_seconds", "Scheduled to last token.", WHOLE_REQUEST)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self._output = histogram("request_generation_tokens", "Output tokens of a request.", tokens)
        self._longest = histogram(
            "request_max_num_generation_tokens", "Output tokens of the longest answer of a request.", tokens
        )
        self._computed = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that no cache had.", tokens
        )
        self._n = histogram("request_params_n", "The n asked for.", CHOICES)
        self._max_tokens = histogram("request_params_max_tokens", "The max_tokens asked for.", tokens)
        success = Counter(
            "vllm:request_success", "Requests that ended, by reason.", (*LABELS, "finished_reason"), registry=registry
        )
        # Every reason exists from the start: a rate over a series that appears late is wrong at its first sample.
        self._success = {r: success.labels(name, "0", r) for r in ("stop", "length", "abort", "error")}
        by_source = Counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens, by where they came from.",
            (*LABELS, "source"),
            registry=registry,
        )
        self._sources = [by_source.labels(name, "0", source) for source in SOURCES]
        self._cached = Counter(
            "vllm:prompt_tokens_cached", "Prompt tokens that a cache had.", LABELS, registry=registry
        ).labels(name, "0")
        self._aborted = Counter(
            "quire_client_disconnects", "Requests whose client went away.", ["model_name"], registry=registry
        ).labels(name)
        self._refused = Counter(
            "quire_requests_refused", "Requests refused, by error code.", ["model_name", "code"], registry=registry
        )
        labels = ["model_name", "cause"]
        self._breaks = Counter(
            "quire_prefix_breaks",
            "Prompts of which tokens were computed again that an earlier one had, by what broke them.",
            labels,
            registry=registry,
        )
        self._lost = Counter("quire_prefix_break_tokens", "Those tokens.", labels, registry=registry)
        self._name = name

    def asked(self, n: int, max_tokens: int | None) -> None:
        """A request was admitted."""
        self._n.observe(n)
        if max_tokens is not None:
            self._max_tokens.observe(max_tokens)

    def first_token(self, seconds: float) -> None:
        """A sequence's first token, `seconds` after its request arrived."""
        self._ttft.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """A later token, `seconds` after the one before."""
        self._itl.observe(seconds)

    def finished(
        self,
        reason: str,
        *,
        prompt: int,
        output: int,
        e2e: float,
        queue: float,
        prefill: float,
        decode: float,
        cached: int = 0,
        loaded: int = 0,
    ) -> None:
        """A sequence ended and its times are known. Of its `prompt` tokens `cached` were in a cache, `loaded` of them in a tier."""
        loaded = min(loaded, cached)
        for source, tokens in zip(self._sources, (prompt - cached, cached - loaded, loaded), strict=True):
            source.inc(tokens)
        self._cached.inc(cached)
        self._computed.observe(prompt - cached)
        self._success[reason if reason in self._success else "error"].inc()
        self._prompt.observe(prompt)
        self._output.observe(output)
        self._e2e.observe(e2e)
        self._queue.observe(queue)
        self._prefill.observe(prefill)
        self._decode.observe(decode)
        self._inference.observe(prefill + decode)
        if output > 1:
            self._per_token.observe(decode / (output - 1))

    def longest(self, output: int) -> None:
        """All answers to a prompt have ended; the longest has so many tokens."""
        self._longest.observe(output)

    def ended(self, reason: str) -> None:
        """A sequence ended early ("abort" or "error"): it counts, but has no times worth a histogram."""
        self._success[reason].inc()

    def disconnected(self) -> None:
        """A client went away before its answer was whole."""
        self._aborted.inc()

    def prefix_broke(self, cause: str, tokens: int) -> None:
        """A prompt was computed again in part. `cause`: the part of the request that changed, or why pages were gone."""
        self._breaks.labels(self._name, cause).inc()
        self._lost.labels(self._name, cause).inc(tokens)

    def refused(self, code: str) -> None:
        """A request was answered with an error from the catalogue."""
        self._refused.labels(self._name, code).inc()


class _OfModels(Collector):
    """The metrics of every model, each name once: the series of all models stand under it, told apart by their labels."""

    def __init__(self) -> None:
        self.registries: dict[str, CollectorRegistry] = {}

    def describe(self) -> Iterable[Metric]:
        return []  # unchecked: nothing else registers these names

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for registry in self.registries.values():
            for family in registry.collect():
                if family.name in families:
                    families[family.name].samples.extend(family.samples)
                else:
                    families[family.name] = family
        return families.values()


class _Tally(Collector):
    """A histogram that is counted once for every token: without locks, because one loop alone counts and reads it."""

    def __init__(self, name: str, what: str, labels: list[str], edges: tuple[float, ...]):
        self._name = name
        self._what = what
        self._labels = labels
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._edges, value)] += 1
        self._sum += value

    def describe(self) -> Iterable[Metric]:
        return []  # unchecked: nothing else registers this name

    def collect(self) -> Iterable[Metric]:
        edges = [*map(floatToGoString, self._edges), "+Inf"]
        made = HistogramMetricFamily(self._name, self._what, labels=LABELS)
        made.add_metric(self._labels, list(zip(edges, accumulate(self._counts), strict=True)), self._sum)
        yield made


class _EngineGauges(Collector):
    """The engine's own counts, read at scrape time. A restarted engine starts its counters at zero, as processes do."""

    def __init__(
        self,
        name: str,
        page_size: int,
        pages: int,
        snapshot: Callable[[], Snapshot],
        restarts: Callable[[], int],
        hangs: Callable[[], int],
    ):
        self.labels = [name, "0"]
        self.page_size = page_size
        self.pages = pages
        self.snapshot = snapshot
        self.restarts = restarts
        self.hangs = hangs

    def describe(self) -> Iterable[Metric]:
        return []  # unchecked: nothing else registers these names

    def collect(self) -> Iterable[Metric]:
        s = self.snapshot()
        used = s.pages_used / s.pages_total if s.pages_total else 0.0
        gauges = (
            ("vllm:num_requests_running", "Sequences in the running batch.", s.running),
            ("vllm:num_requests_waiting", "Sequences waiting to be scheduled.", s.waiting),
            ("quire_num_requests_loading", "Of these, the ones whose pages are being loaded from a tier.", s.loading),
            (
                "quire_step_time_bound_seconds",
                "What a step with prompts may take beside sequences that decode; 0: no bound.",
                s.step_bound,
            ),
            ("vllm:kv_cache_usage_perc", "Share of the KV pages in use; 1 is all of them.", used),
        )
        counters = (
            ("vllm:num_preemptions", "Sequences that lost their pages for a while.", s.preemptions),
            ("vllm:prompt_tokens", "Prompt tokens processed, cached ones included.", s.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", s.output_tokens),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix tree.", s.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix tree.", s.prefix_hits),
            ("vllm:external_prefix_cache_hits", "Tokens whose pages were loaded from a tier.", s.loaded_tokens),
            (
                "vllm:spec_decode_num_draft_tokens",
                "Draft tokens of speculative decoding that were verified.",
                s.drafted_tokens,
            ),
            ("vllm:spec_decode_num_accepted_tokens", "Of these, the ones that were right.", s.accepted_tokens),
            ("quire_engine_steps", "Steps run.", s.steps),
            ("quire_cache_evictions", "Cached pages given up for room.", s.evictions),
            ("quire_engine_restarts", "Times the engine process was started again.", self.restarts()),
            ("quire_engine_hangs", "Times the engine process was killed because it did not answer.", self.hangs()),
        )
        for name, what, value in gauges:
            gauge = GaugeMetricFamily(name, what, labels=LABELS)
            gauge.add_metric(self.labels, value)
            yield gauge
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Sequences waiting for room (capacity), or for pages from a tier (deferred).",
            labels=[*LABELS, "reason"],
        )
        reasons.add_metric([*self.labels, "capacity"], s.waiting - s.loading)
        reasons.add_metric([*self.labels, "deferred"], s.loading)
        yield reasons
        for name, what, value in counters:
            counter = CounterMetricFamily(name, what, labels=LABELS)
            counter.add_metric(self.labels, value)
            yield counter
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV pool.", labels=[*LABELS, "block_size", "num_gpu_blocks"]
        )
        info.add_metric([*self.labels, str(self.page_size), str(self.pages)], 1)
        yield info
