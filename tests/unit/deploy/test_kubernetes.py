"""deploy/kubernetes and the chart: pods start what Quire has, drain in their time and are restricted; schemas and Helm itself agree."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quire.config import VERSION
from tests.unit.deploy.kit import DEPLOY, check_pod, checker, documents, served

PLAIN = DEPLOY / "kubernetes"
CHART = DEPLOY / "helm" / "quire"
OF_OPERATORS = {"monitoring.coreos.com/v1", "keda.sh/v1alpha1", "kustomize.config.k8s.io/v1beta1"}
VALUES = [
    {},
    {"gpus": 2, "image": {"repository": "r.example/quire-cuda", "tag": "1"}, "replicas": 3, "persistence": {"enabled": False}},
    {"models": ["a=hf:o/r", "smollm2:135m"], "args": ["--context", "8192"], "env": [{"name": "HF_TOKEN", "value": "x"}]},
    {"auth": {"key": "s3cret"}, "ingress": {"enabled": True, "host": "llm.example.org", "className": "nginx", "tlsSecret": "t"}},
    {"auth": {"existingSecret": "mine"}, "autoscaling": {"kind": "keda"}, "metrics": {"serviceMonitor": {"enabled": True}}},
    {"autoscaling": {"kind": "hpa"}, "podDisruptionBudget": {"maxUnavailable": "50%"}, "service": {"annotations": {"a": "b"}}},
    {
        "nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}], "podAnnotations": {"a": "b"},
        "affinity": {"nodeAffinity": {}}, "imagePullSecrets": [{"name": "s"}], "drainSeconds": 300, "resources": {"limits": {}},
    },
]  # fmt: skip
REFUSED = [
    {"models": []},
    {"models": ["--host"]},
    {"args": ["--api-key=k"]},
    {"args": ["--drain-seconds", "9"]},
    {"typo": 1},
    {"gpus": "one"},
    {"ingress": {"enabled": True}},
    {"autoscaling": {"kind": "vpa"}},
]


def of(kind: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    (one,) = [document for document in found if document["kind"] == kind]
    return one


def plain() -> list[dict[str, Any]]:
    files = sorted(PLAIN.glob("*.yaml"))
    assert files
    return [document for file in files for document in documents(file.read_text())]


def check_whole(found: list[dict[str, Any]]) -> None:
    """A set of manifests: its parts name each other."""
    server = of("StatefulSet", found)
    pods = server["spec"]["template"]["metadata"]["labels"]
    services = {d["metadata"]["name"]: d["spec"] for d in found if d["kind"] == "Service"}
    assert services[server["spec"]["serviceName"]].get("clusterIP") == "None"
    assert any(spec.get("clusterIP") != "None" for spec in services.values())
    selectors = [spec["selector"] for spec in services.values()] + [server["spec"]["selector"]["matchLabels"]]
    selectors += [d["spec"]["selector"]["matchLabels"] for d in found if d["kind"] == "PodDisruptionBudget"]
    assert all(selector.items() <= pods.items() and selector for selector in selectors)
    names = {port["name"] for c in server["spec"]["template"]["spec"]["containers"] for port in c["ports"]}
    assert {p["targetPort"] for spec in services.values() for p in spec["ports"]} <= names
    for scaler in [d for d in found if d["kind"] in ("ScaledObject", "HorizontalPodAutoscaler")]:
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) == ("StatefulSet", server["metadata"]["name"])
    (secret,) = {
        e["valueFrom"]["secretKeyRef"]["name"]
        for c in server["spec"]["template"]["spec"]["containers"]
        for e in c["env"]
        if e["name"] == "QUIRE_API_KEY"
    }
    for monitor in [d for d in found if d["kind"] == "ServiceMonitor"]:
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["path"] == "/metrics" and endpoint["authorization"]["credentials"]["name"] == secret
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        watched = [d for d in found if d["kind"] == "Service" and wanted <= d["metadata"]["labels"].items()]
        assert len(watched) == 1, "no pod is scraped twice"


def test_plain_manifests():
    found = plain()
    check_whole(found)
    pod = of("StatefulSet", found)["spec"]["template"]["spec"]
    check_pod(pod)
    claims = {c["metadata"]["name"] for c in of("StatefulSet", found)["spec"]["volumeClaimTemplates"]}
    volumes = claims | {volume["name"] for volume in pod["volumes"]}
    assert volumes == {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}


@pytest.mark.parametrize("folder", ["kubernetes", "kubernetes-cuda"])
def test_kustomizations_name_files_and_this_version(folder: str):
    here = DEPLOY / folder
    (kustomization,) = documents((here / "kustomization.yaml").read_text())
    assert all((here / name).exists() for name in kustomization["resources"])
    assert [image["newTag"] for image in kustomization["images"]] == [VERSION]
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("kubectl is not here")
    done = subprocess.run([program, "kustomize", str(here)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = documents(done.stdout)
    check_whole(found)
    pod = of("StatefulSet", found)["spec"]["template"]["spec"]
    check_pod(pod)
    cuda = folder.endswith("cuda")
    assert pod["containers"][0]["image"] == f"{'quire-cuda' if cuda else 'quire'}:{VERSION}"
    assert ("nvidia.com/gpu" in pod["containers"][0]["resources"]["limits"]) == cuda


def test_plain_manifests_against_kubernetes_schemas():
    validator = checker("kubernetes_validate")
    known = [document for document in plain() if document["apiVersion"] not in OF_OPERATORS]
    assert len(known) == 5
    for document in known:
        validator.validate(document, "1.34", strict=True)
    document = known[0]
    document["spec"]["nonsense"] = 1
    with pytest.raises(Exception, match="nonsense"):
        validator.validate(document, "1.34", strict=True)


def chart_values() -> dict[str, Any]:
    (values,) = documents((CHART / "values.yaml").read_text())
    return values


def over(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Values as Helm lays some over others."""
    merged = dict(values)
    for key, value in more.items():
        merged[key] = (
            over(values[key], value) if isinstance(value, dict) and isinstance(values.get(key), dict) else value
        )
    return merged


def test_the_chart_is_of_this_version_and_its_values_fit_its_schema():
    (chart,) = documents((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == VERSION
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    values = chart_values()
    assert set(schema["properties"]) - {"global"} == set(values), "a value without a schema, or the other way round"
    for more in VALUES:
        jsonschema.validate(over(values, more), schema)
    for more in REFUSED:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(over(values, more), schema)


def test_templates_use_values_that_there_are():
    """Every .Values.a.b of a template is in values.yaml, and every value is used by some template."""
    values = chart_values()
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    used = set(re.findall(r"\.Values\.([\w.]+)", text))
    for name in used:
        at: Any = values
        for part in name.split("."):
            assert isinstance(at, dict) and part in at, f"there is no value {name}"
            at = at[part]
    leaves = [f"{k}.{inner}" for k, v in values.items() if isinstance(v, dict) for inner in v]
    leaves += [k for k, v in values.items() if not isinstance(v, dict) or not v]
    for leaf in leaves:
        first = leaf.partition(".")[0]
        assert any(name in (leaf, first) or name.startswith(f"{leaf}.") for name in used), f"{leaf} is used nowhere"
    for path in (CHART / "templates").iterdir():
        assert path.read_text().count("{{") == path.read_text().count("}}"), path.name


def rendered(values: dict[str, Any], release: str = "quire") -> tuple[list[dict[str, Any]], str]:
    """What Helm makes of the chart: documents, and its notes."""
    helm = checker("helm_python")
    with helm.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name=release, namespace="llm")
    found = [document for name, text in files.items() if name.endswith(".yaml") for document in documents(text)]
    return found, next(text for name, text in files.items() if name.endswith("NOTES.txt"))


@pytest.mark.parametrize("values", VALUES, ids=[",".join(values) or "defaults" for values in VALUES])
@pytest.mark.parametrize("release", ["quire", "two"])
def test_the_chart_as_helm_renders_it(values: dict[str, Any], release: str):
    found, notes = rendered(values, release)
    whole = over(chart_values(), values)
    name = "quire" if release == "quire" else "two-quire"
    check_whole(found)
    server = of("StatefulSet", found)
    assert server["metadata"]["name"] == name and server["metadata"]["name"] in notes
    if whole["resources"]["limits"]:
        check_pod(server["spec"]["template"]["spec"])
    (container,) = server["spec"]["template"]["spec"]["containers"]
    given = served(container["args"])
    assert given["models"] == whole["models"] and given["drain_seconds"] == whole["drainSeconds"]
    assert container["args"][-len(whole["args"]) :] == whole["args"] or not whole["args"]
    assert container["resources"].get("limits", {}).get("nvidia.com/gpu", 0) == whole["gpus"]
    assert ("replicas" in server["spec"]) == (whole["autoscaling"]["kind"] == "none")
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] >= 3600
    secrets = [document for document in found if document["kind"] == "Secret"]
    assert bool(secrets) != bool(whole["auth"]["existingSecret"])
    for secret in secrets:
        key = base64.b64decode(secret["data"]["api-key"]).decode()
        assert key == whole["auth"]["key"] or (not whole["auth"]["key"] and len(key) == 48)
        assert key not in notes
    kinds = {document["kind"] for document in found}
    assert ("Ingress" in kinds) == whole["ingress"]["enabled"]
    assert ("ServiceMonitor" in kinds) == whole["metrics"]["serviceMonitor"]["enabled"]
    assert ("ScaledObject" in kinds, "HorizontalPodAutoscaler" in kinds) == (
        whole["autoscaling"]["kind"] == "keda",
        whole["autoscaling"]["kind"] == "hpa",
    )
    validator = checker("kubernetes_validate")
    for document in found:
        if document["apiVersion"] not in OF_OPERATORS:
            validator.validate(document, "1.34", strict=True)


@pytest.mark.parametrize("values", REFUSED, ids=[",".join(values) for values in REFUSED])
def test_helm_refuses_what_the_schema_refuses(values: dict[str, Any]):
    checker("helm_python")
    with pytest.raises(Exception, match=r"schema|values"):
        rendered(values)


def test_helm_has_nothing_to_complain_about():
    helm = checker("helm_python")
    for values in VALUES:
        told = helm.lint(str(CHART), values, strict=True)
        assert not told["errors"] and [m["error"] for m in told["messages"]] in ([], ["icon is recommended"])


def test_the_chart_and_the_manifests_say_the_same_of_a_pod():
    """With the chart's defaults the pod is the plain one: a change of one is a change of both."""
    pods = [of("StatefulSet", found)["spec"]["template"]["spec"] for found in (plain(), rendered({})[0])]
    for pod in pods:
        for container in pod["containers"]:
            del container["image"]
            container.pop("imagePullPolicy", None)
    assert pods[0] == pods[1]


def test_paths_are_text():
    """No file of the chart has a tab, which YAML does not take, or ends without a line's end."""
    for path in [p for p in CHART.rglob("*") if p.is_file()]:
        text = Path(path).read_text()
        assert "\t" not in text and text.endswith("\n"), path
