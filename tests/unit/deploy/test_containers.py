"""deploy/docker: what the files name is there, what they start is a command of Quire's, and nothing runs as root.

No image is built here; hadolint and compose's own model look at the files where `make test-deploy` has brought them.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quire.config import Environment
from tests.unit.deploy.kit import DEPLOY, ROOT, checker, documents, project, served

FILES = ("Dockerfile", "Dockerfile.cuda")
TRACKED = (
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "native/CMakeLists.txt",
    "quire/cli/main.py",
    "native/src/plan.cpp",
)
KEPT_OUT = (
    *(
        ".env",
        "deploy/docker/.env",
        ".git/config",
        ".venv/bin/python",
        "quire/cli/__pycache__/main.pyc",
        "native/build/x.o",
    ),
    *("quire/backends/native/_native.so", "tests/conftest.py", "model.gguf"),
)


class Line(NamedTuple):
    """An instruction of a Dockerfile."""

    what: str
    rest: str


def stages(name: str) -> list[list[Line]]:
    """The instructions of each stage; the first list is what stands before them."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "docker" / name).read_text(), flags=re.M)
    found: list[list[Line]] = [[]]
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if line.strip():
            what, _, rest = line.strip().partition(" ")
            if what == "FROM":
                found.append([])
            found[-1].append(Line(what, rest.strip()))
    return found


def only(stage: list[Line], what: str) -> str:
    (found,) = [line.rest for line in stage if line.what == what]
    return found


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_is_there_and_is_in_the_context(name: str):
    _, build, last = stages(name)
    for line in build:
        if line.what == "COPY":
            for source in line.rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert in_context(source), f"{source} is kept out by .dockerignore"
    assert only(last, "COPY").split()[0] == "--from=build", "the last stage takes nothing from the checkout"


def in_context(path: str) -> bool:
    """Whether .dockerignore lets a path into a build: the last pattern that fits it, or a folder above it, decides."""
    kept = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if pattern and not pattern.startswith("#"):
            back = pattern.startswith("!")
            parts = Path(path).parts
            above = ["/".join(parts[: n + 1]) for n in range(len(parts))]
            if any(fits(one, pattern.removeprefix("!")) for one in above):
                kept = back
    return kept


def fits(path: str, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return fnmatch.fnmatchcase(path.rpartition("/")[2], pattern[3:])
    return path.count("/") == pattern.count("/") and fnmatch.fnmatchcase(path, pattern)


def test_the_context_has_what_a_build_needs_and_no_more():
    assert [path for path in TRACKED if not in_context(path)] == []
    assert [path for path in KEPT_OUT if in_context(path)] == []
    done = subprocess.run(["git", "ls-files", "native", "quire"], cwd=ROOT, capture_output=True, text=True)
    assert [path for path in done.stdout.splitlines() if not in_context(path)] == []


@pytest.mark.parametrize("name", FILES)
def test_extras_that_are_installed_exist(name: str):
    _, build, _ = stages(name)
    installed = [line.rest for line in build if "pip install" in line.rest]
    assert len(installed) == 1
    extras = set(re.findall(r'"\.\[([\w,]+)\]"', installed[0]))
    assert extras == ({"cuda"} if name.endswith("cuda") else set())
    assert extras <= set(project()["optional-dependencies"])


@pytest.mark.parametrize("name", FILES)
def test_the_run_stage_starts_a_server_that_is_not_root(name: str):
    _, build, last = stages(name)
    program, verb, *words = json.loads(only(last, "ENTRYPOINT"))  # exec form: SIGTERM reaches the server
    assert program in project()["scripts"] and verb == "serve"
    given = served(words)
    assert given["host"] == "0.0.0.0" and given["port"] == int(only(last, "EXPOSE"))
    user = only(last, "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number: Kubernetes cannot tell a name from root"
    uid, gid = user.split(":")
    (made,) = [line.rest for line in last if "useradd" in line.rest]
    assert f"--uid {uid}" in made and f"--gid {gid}" in made
    home = only(last, "VOLUME")
    assert f"QUIRE_HOME={home}" in only(last, "ENV") and f"--home-dir {home}" in made
    order = [line.what for line in last]
    assert order.index("USER") > order.index("COPY") and "USER" not in [line.what for line in build]
    compilers = [line.rest for line in last if re.search(r"\b(g\+\+|build-essential|cmake)\b", line.rest)]
    assert not compilers, "the compiler stays behind"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (None, 1)])
def test_the_health_check_tells_health(name: str, status: int | None, code: int, tmp_path: Path):
    """The check's own program, with a server in the place of the real one and a proxy that nothing must go through."""
    _, _, last = stages(name)
    options, _, program = only(last, "HEALTHCHECK").partition(" CMD ")
    assert "--start-period" in options
    words = json.loads(program)
    assert words[:2] == ["python", "-c"] and "'127.0.0.1', 8000" in words[2] and "/health" in words[2]
    with answering(status) as port:
        script = words[2].replace("8000", str(port))
        done = subprocess.run(
            [sys.executable, "-c", script], env={"http_proxy": "http://127.0.0.1:9"}, capture_output=True, timeout=30
        )
    assert done.returncode == code, done.stderr


class answering:
    """A server on a free port that says one status to everything; None: nobody is there."""

    def __init__(self, status: int | None):
        import http.server
        import threading

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status or 500)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.httpd = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.httpd.server_address[1]
        self.thread = threading.Thread(target=self.httpd.serve_forever) if status else None

    def __enter__(self) -> int:
        if self.thread is None:
            self.httpd.server_close()
        else:
            self.thread.start()
        return self.port

    def __exit__(self, *_: object) -> None:
        if self.thread is not None:
            self.httpd.shutdown()
            self.thread.join()
            self.httpd.server_close()


def composed(name: str) -> dict[str, Any]:
    (document,) = documents((DEPLOY / "docker" / name).read_text())
    return document


def test_compose():
    whole = composed("compose.yaml")
    service = whole["services"]["quire"]
    build = service["build"]
    context = (DEPLOY / "docker" / build["context"]).resolve()
    assert context == ROOT and (context / build["dockerfile"]).is_file()
    words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in service["command"]]
    seconds = served(words)["drain_seconds"]
    assert int(service["stop_grace_period"].removesuffix("s")) >= seconds + 10
    volume, _, where = service["volumes"][0].partition(":")
    assert volume in whole["volumes"] and where == only(stages("Dockerfile")[-1], "VOLUME")
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"] and service["tmpfs"] == ["/tmp"]
    assert service["environment"]["QUIRE_API_KEY"].startswith("${QUIRE_API_KEY:?"), "no server without a key"
    assert "QUIRE_API_KEY" in (ROOT / "quire/config.py").read_text() and "api_key" in Environment.__annotations__
    over = composed("compose.cuda.yaml")["services"]["quire"]
    assert (context / over["build"]["dockerfile"]).is_file()
    (device,) = over["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cuda.yaml"])
def test_compose_as_its_specification_has_it(name: str):
    compose = checker("compose_spec").PyCompose
    text = (DEPLOY / "docker" / name).read_text()
    (service,) = compose.from_yaml(text).service_names()
    assert service == "quire"
    with pytest.raises(Exception, match="restart"):  # it looks into services at all
        compose.from_yaml(text.replace("    image:", "    restart: [sometimes]\n    image:"))


@pytest.mark.parametrize("name", FILES)
def test_hadolint(name: str):
    program = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.defpath]))
    if program is None:
        pytest.skip("hadolint is not here: `make test-deploy` brings it")
    done = subprocess.run([program, str(DEPLOY / "docker" / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
