"""What the tests of deploy/ share: its files as data, the options of `quire serve`, and optional checkers."""

from __future__ import annotations

import importlib
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
yaml = pytest.importorskip("yaml", reason="PyYAML is not here: it comes with the test extra")


def documents(text: str) -> list[dict[str, Any]]:
    """The documents of YAML that are not empty. A key that stands twice is an error, which PyYAML alone would pass over."""

    class Strict(yaml.SafeLoader):
        pass

    def mapping(loader: Any, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [loader.construct_object(key, deep) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"line {node.start_mark.line + 1}: a key stands twice among {keys}"
        return yaml.SafeLoader.construct_mapping(loader, node, deep)

    Strict.add_constructor("tag:yaml.org,2002:map", mapping)
    return [document for document in yaml.load_all(text, Strict) if document is not None]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def checker(module: str) -> Any:
    """A module of the `deploy` extra; without it the test is skipped, and says so."""
    try:
        return importlib.import_module(module)
    except ImportError:
        pytest.skip(f"{module} is not here: `make test-deploy` brings it")


@cache
def serve() -> Any:
    from quire.cli.app import load

    return load("serve")


def served(words: list[str]) -> dict[str, Any]:
    """What `quire serve` reads from these words; its own error where it refuses them."""
    return serve().make_context("serve", list(words)).params


def check_pod(spec: dict[str, Any]) -> None:
    """A pod of Quire: its words, probes, shutdown and restrictions, whoever wrote it."""
    (container,) = spec["containers"]
    given = served(container["args"])
    assert given["models"] and given["api_key"] is None
    key = container["env"][0]
    assert key["name"] == "QUIRE_API_KEY" and "secretKeyRef" in key["valueFrom"]
    probes = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert probes == {"startup": "/health", "liveness": "/live", "readiness": "/ready"}
    (port,) = container["ports"]
    assert (port["name"], port["containerPort"]) == ("http", given["port"])
    pause = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pause[0] == "sleep"
    assert spec["terminationGracePeriodSeconds"] >= int(pause[1]) + given["drain_seconds"] + 10
    own = container["securityContext"]
    assert own["allowPrivilegeEscalation"] is False and own["capabilities"] == {"drop": ["ALL"]}
    assert own["readOnlyRootFilesystem"] is True
    pod = spec["securityContext"]
    assert pod["runAsNonRoot"] is True and pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert {m["mountPath"] for m in container["volumeMounts"]} == {"/var/lib/quire", "/tmp"}
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
    assert spec["automountServiceAccountToken"] is False
