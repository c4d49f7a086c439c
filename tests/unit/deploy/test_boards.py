"""The dashboard, the alerts and the autoscalers ask for metrics, labels and codes that a server of Quire's really has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.config import ServerConfig
from quire.observe.errors import Busy
from tests.unit.deploy.kit import DEPLOY, ROOT, checker, documents
from tests.unit.server.fakes import FakeCompleter, client_for

NAME = re.compile(r"(?<![\w.])((?:vllm:|quire_|process_|up\b)[\w:]*)(\{[^}]*\})?")
ADDED = {"job", "instance", "namespace", "pod"}  # by Prometheus, as it scrapes
HI = {"messages": [{"role": "user", "content": "hi"}]}


def queries() -> list[tuple[str, str]]:
    """Every query of deploy/, and where it stands."""
    found = [(f"alert {rule['alert']}", rule["expr"]) for rule in rules()]
    board = json.loads((DEPLOY / "grafana" / "quire.json").read_text())
    found += [(f"panel {p['title']}", t["expr"]) for p in board["panels"] for t in p.get("targets", [])]
    (scaled,) = documents((DEPLOY / "kubernetes" / "scaledobject.yaml").read_text())
    found += [("scaledobject.yaml", t["metadata"]["query"]) for t in scaled["spec"]["triggers"]]
    chart = (DEPLOY / "helm/quire/templates/autoscaling.yaml").read_text()
    found += [("autoscaling.yaml", q.replace("{{ $of }}", "")) for q in re.findall(r"query: (.*)", chart)]
    (adapter,) = documents((DEPLOY / "prometheus" / "adapter.yaml").read_text())
    found += [("adapter.yaml", rule["seriesQuery"]) for rule in adapter["rules"]["custom"]]
    page = (ROOT / "docs" / "deploying.md").read_text()
    return found + [("deploying.md", q) for q in re.findall(r"^```promql\n(.*?)\n```", page, re.M | re.S)]


def rules() -> list[dict[str, Any]]:
    (alerts,) = documents((DEPLOY / "prometheus" / "alerts.yaml").read_text())
    return [rule for group in alerts["groups"] for rule in group["rules"]]


@pytest.fixture
async def samples() -> dict[str, set[str]]:
    """Every sample of a server that has answered and refused, with the labels it has."""
    completer = FakeCompleter()
    async with client_for(completer) as http:
        await http.post("/v1/chat/completions", json=HI)
        completer.raises = Busy("full")
        await http.post("/v1/chat/completions", json=HI)
        text = (await http.get("/metrics")).text
    found: dict[str, set[str]] = {"up": set()}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def grouped(query: str) -> Iterator[str]:
    for names in re.findall(r"\bby \(([^)]*)\)", query):
        yield from (name.strip() for name in names.split(","))


async def test_metrics_and_labels_are_there(samples: dict[str, set[str]]):
    asked = queries()
    assert len(asked) > 40
    for where, query in asked:
        metrics = NAME.findall(query)
        assert metrics, f"{where} asks for nothing: {query}"
        of_all: set[str] = set()
        for name, matchers in metrics:
            assert name in samples, f"{where}: there is no metric {name}"
            own = samples[name] | ADDED
            of_all |= own
            for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers):
                assert label in own, f"{where}: {name} has no label {label}"
        for label in grouped(query):
            assert label in of_all, f"{where}: nothing has a label {label}"
        if "_total" in query or "_bucket" in query:
            assert re.search(r"\b(rate|increase)\(", query), f"{where}: a counter is asked for itself"
    for rule in rules():
        own = {label for name, _ in NAME.findall(rule["expr"]) for label in samples[name]} | ADDED
        for label in re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])):
            assert label in own and (" by " not in rule["expr"] or label in set(grouped(rule["expr"]))), rule["alert"]


async def test_metrics_that_scale_keep_their_names(samples: dict[str, set[str]]):
    """The adapter's rules give the horizontal autoscaler its names."""
    (adapter,) = documents((DEPLOY / "prometheus" / "adapter.yaml").read_text())
    made = set()
    for rule in adapter["rules"]["custom"]:
        series = rule["seriesQuery"].partition("{")[0]
        assert series in samples
        made.add(re.sub(rule["name"]["matches"], rule["name"]["as"].replace("${1}", r"\1"), series))
    (plain,) = documents((DEPLOY / "kubernetes" / "hpa.yaml").read_text())
    chart = (DEPLOY / "helm/quire/templates/autoscaling.yaml").read_text()
    assert {metric["pods"]["metric"]["name"] for metric in plain["spec"]["metrics"]} == made
    assert set(re.findall(r"name: (vllm_\w+)", chart)) == made


def test_codes_and_reasons_are_those_that_are_counted():
    source = "".join(path.read_text() for path in (ROOT / "quire").rglob("*.py"))
    for rule in rules():
        for codes in re.findall(r'(?:code|finished_reason)=~?"([^"]+)"', rule["expr"]):
            for code in codes.split("|"):
                assert re.search(rf'(?i)(code = |CODE = |reason.*|for r in .*)"{code}"', source), code


def test_alerts_are_whole():
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) >= 6
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]
        for option in re.findall(r"--[\w-]+", rule["annotations"]["description"]):
            from tests.unit.deploy.kit import serve

            assert option in {name for parameter in serve().params for name in parameter.opts}, option


def test_the_dashboard_is_whole():
    board = json.loads((DEPLOY / "grafana" / "quire.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels)))
    assert used - {"__rate_interval"} <= variables
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells


def test_the_server_scrapes_with_its_key():
    (part,) = documents((DEPLOY / "prometheus" / "scrape.yaml").read_text())
    (job,) = part["scrape_configs"]
    assert job["job_name"] == "quire" and job["metrics_path"] == "/metrics" and "authorization" in job
    assert (DEPLOY / "prometheus" / part["rule_files"][0]).exists()
    assert job["static_configs"][0]["targets"] == [f"127.0.0.1:{ServerConfig().port}"]


def test_queries_are_promql():
    promql = checker("promql_parser")
    for where, query in queries():
        try:
            promql.parse(query.replace("$__rate_interval", "1m"))
        except ValueError as error:
            raise AssertionError(f"{where}: {error}") from None
