"""GET /metrics: vLLM's names, types, labels and edges, with the right numbers in them."""

from __future__ import annotations

import sys

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.types import Stats
from quire.observe import metrics
from quire.observe.errors import Busy
from quire.observe.metrics import Metrics, one_two_five
from tests.unit.server.fakes import MODEL, FakeCompleter, client_for, service_over

HI = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"

# name -> type, as a scrape of vLLM shows them
VLLM = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:external_prefix_cache_hits": "counter",
    "vllm:request_success": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:request_prefill_kv_computed_tokens": "histogram",
    "vllm:prompt_tokens_by_source": "counter",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:num_requests_waiting_by_reason": "gauge",
    "vllm:cache_config_info": "gauge",
}


class Scrape:
    def __init__(self, text: str):
        self.families = {f.name: f for f in text_string_to_metric_families(text)}

    def value(self, sample: str, **labels: str) -> float:
        found = [
            s.value
            for f in self.families.values()
            for s in f.samples
            if s.name == sample and labels.items() <= s.labels.items()
        ]
        assert len(found) == 1, (sample, labels, found)
        return found[0]


async def test_names_types_and_labels():
    async with client_for() as http:
        await http.post(CHAT, json=HI)
        r = await http.get("/metrics")
    assert r.headers["content-type"].startswith("text/plain; version=")
    scrape = Scrape(r.text)
    assert {n: scrape.families[n].type for n in VLLM} == VLLM
    for name in VLLM:
        for sample in scrape.families[name].samples:
            assert sample.labels["model_name"] == MODEL
            assert sample.labels["engine"] == "0"
    info = scrape.families["vllm:cache_config_info"].samples[0]
    assert (info.labels["block_size"], info.labels["num_gpu_blocks"], info.value) == ("16", "100", 1)


async def test_the_engines_own_numbers():
    completer = FakeCompleter()
    service = service_over(completer)
    completer.client.snapshot = Stats(
        running=3, waiting=4, pages_total=200, pages_used=50, prompt_tokens=11, output_tokens=12, prefix_queries=13,
        prefix_hits=5, preemptions=2, steps=99, loading=1, loaded_tokens=7,
    )  # fmt: skip
    service.models.first.restarted = 6
    completer.client.hangs = 2
    async with client_for(service=service) as http:
        scrape = Scrape((await http.get("/metrics")).text)
    assert scrape.value("vllm:num_requests_running") == 3
    assert scrape.value("vllm:num_requests_waiting") == 4
    assert scrape.value("quire_num_requests_loading") == 1
    waiting = {
        reason: scrape.value("vllm:num_requests_waiting_by_reason", reason=reason)
        for reason in ("capacity", "deferred")
    }
    assert waiting == {"capacity": 3, "deferred": 1}
    assert scrape.value("vllm:kv_cache_usage_perc") == 0.25
    assert scrape.value("vllm:prompt_tokens_total") == 11
    assert scrape.value("vllm:generation_tokens_total") == 12
    assert scrape.value("vllm:prefix_cache_queries_total") == 13
    assert scrape.value("vllm:prefix_cache_hits_total") == 5
    assert scrape.value("vllm:external_prefix_cache_hits_total") == 7
    assert scrape.value("vllm:num_preemptions_total") == 2
    assert scrape.value("quire_engine_restarts_total") == 6
    assert scrape.value("quire_engine_hangs_total") == 2
    assert scrape.value("quire_engine_steps_total") == 99


async def test_what_requests_leave_behind():
    completer = FakeCompleter()
    async with client_for(completer) as http:
        await http.post(CHAT, json=HI | {"n": 2, "max_tokens": 13})
        await http.post(CHAT, json=HI | {"stream": True})
        completer.raises = Busy("full")
        await http.post(CHAT, json=HI)
        completer.raises, completer.dies = None, RuntimeError("x")
        await http.post(CHAT, json=HI)
        await http.get("/no/such/route")
        await http.get("/another")
        scrape = Scrape((await http.get("/metrics")).text)
    success = "vllm:request_success_total"
    assert scrape.value(success, finished_reason="stop") == 2
    assert scrape.value(success, finished_reason="length") == 1
    assert scrape.value(success, finished_reason="error") == 1
    assert scrape.value(success, finished_reason="abort") == 0
    assert scrape.value("vllm:time_to_first_token_seconds_count") == 4  # the one that died had begun
    assert scrape.value("vllm:inter_token_latency_seconds_count") == 12 * 3 + 2
    assert scrape.value("vllm:e2e_request_latency_seconds_count") == 3
    assert scrape.value("vllm:request_generation_tokens_sum") == 39
    assert scrape.value("vllm:request_prompt_tokens_sum") == 24
    assert scrape.value("vllm:request_max_num_generation_tokens_count") == 2  # two answers to one prompt count once
    assert scrape.value("vllm:request_max_num_generation_tokens_sum") == 13 + 13
    assert abs(scrape.value("vllm:request_queue_time_seconds_sum") - 0.03) < 1e-9
    assert abs(scrape.value("vllm:request_inference_time_seconds_sum") - 0.15) < 1e-9
    assert scrape.value("vllm:request_params_n_count") == 4
    assert scrape.value("vllm:request_params_max_tokens_sum") == 13
    assert scrape.value("quire_requests_refused_total", code="queue_full") == 1
    assert scrape.value("quire_http_requests_total", route=CHAT, status="200") == 2
    assert scrape.value("quire_http_requests_total", route=CHAT, status="429") == 1
    assert scrape.value("quire_http_requests_total", route="other", status="404") == 2  # no label per invented path


def test_prompt_tokens_by_where_they_came_from():
    metrics = Metrics()
    model = metrics.model("m", context=1000, page_size=16, pages=1, snapshot=Stats)
    times = {"e2e": 1.0, "queue": 0.0, "prefill": 0.5, "decode": 0.5}
    model.finished("stop", prompt=100, output=5, cached=64, loaded=48, **times)
    model.finished("stop", prompt=10, output=5, **times)
    scrape = Scrape(metrics.render().decode())
    name = "vllm:prompt_tokens_by_source_total"
    assert scrape.value(name, source="local_compute") == 36 + 10
    assert scrape.value(name, source="local_cache_hit") == 16
    assert scrape.value(name, source="external_kv_transfer") == 48
    assert scrape.value("vllm:prompt_tokens_cached_total") == 64
    assert scrape.value("vllm:request_prefill_kv_computed_tokens_sum") == 46
    if sys.platform == "linux":
        assert scrape.value("process_resident_memory_bytes") > 1 << 20


def test_bucket_edges():
    assert one_two_five(100) == [1, 2, 5, 10, 20, 50, 100]
    assert one_two_five(8192)[-1] == 5000
    metrics = Metrics()
    metrics.model("m", context=50, page_size=16, pages=1, snapshot=Stats)
    families = {f.name: f for f in text_string_to_metric_families(metrics.render().decode())}

    def edges(name: str) -> list[float]:
        return [float(s.labels["le"]) for s in families[name].samples if s.name.endswith("_bucket")][:-1]

    assert edges("vllm:request_prompt_tokens") == [1, 2, 5, 10, 20, 50]
    assert edges("vllm:request_params_n") == [1, 2, 5, 10, 20]
    assert edges("vllm:time_to_first_token_seconds")[:4] == [0.001, 0.005, 0.01, 0.02]
    assert edges("vllm:time_to_first_token_seconds")[-2:] == [640, 2560]
    assert edges("vllm:inter_token_latency_seconds")[0] == 0.01
    assert edges("vllm:e2e_request_latency_seconds")[-1] == 7680


def test_two_servers_in_one_process_do_not_mix():
    one, two = Metrics(), Metrics()
    one.http("/x", "GET", 200, 0.1)
    assert b'route="/x"' in one.render()
    assert b'route="/x"' not in two.render()


def test_the_tally_of_tokens_is_the_librarys_histogram():
    edges = (0.01, 0.5, 2.5)
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    labels = dict.fromkeys(metrics.LABELS, "a")
    histogram = Histogram("x", "what", metrics.LABELS, buckets=edges, registry=theirs).labels(**labels)
    tally = metrics._Tally("x", "what", list(labels.values()), edges)
    ours.register(tally)
    for value in (0.0, 0.01, 0.0100001, 0.4, 0.5, 2.5, 2.6, 100.0):
        histogram.observe(value)
        tally.observe(value)

    def text(registry: CollectorRegistry) -> list[str]:
        return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]

    assert text(ours) == text(theirs)
