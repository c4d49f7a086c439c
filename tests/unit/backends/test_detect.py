"""What `--device auto` means: decided by what is there, cheap where nothing is, and told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import quire.backends.detect as module
from quire.backends.detect import detect
from quire.config import EngineConfig
from quire.engine.construction.build import choose_backend
from quire.machine import gpu_devices
from quire.observe.errors import BadRequest

ROOT = Path(__file__).resolve().parents[3]


def device(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def seen(monkeypatch: pytest.MonkeyPatch, *answer: object) -> None:
    pytest.importorskip("torch", reason="needs the torch extra")
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr("quire.backends.torch.gpu.look", lambda: answer)


def test_device_files(tmp_path: Path):
    assert gpu_devices(tmp_path) == []
    assert gpu_devices(device(tmp_path, "dev/nvidiactl", "dev/nvidia-uvm", "dev/null")) == []
    assert gpu_devices(device(tmp_path, "dev/nvidia0", "dev/nvidia1")) == ["nvidia0", "nvidia1"]
    assert gpu_devices(device(tmp_path / "wsl", "dev/dxg")) == []
    assert gpu_devices(device(tmp_path / "wsl", "usr/lib/wsl/lib/libcuda.so.1")) == ["dxg"]


def test_without_a_gpu_torch_is_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "find_spec", lambda name: pytest.fail("looked for torch"))
    assert detect(tmp_path).backend == "native" and "no NVIDIA GPU" in detect(tmp_path).why


def test_a_gpu_without_torch_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "triton" else object())
    found = detect(device(tmp_path, "dev/nvidia0"))
    assert found.backend == "native" and "triton cannot be imported: pip install 'quire[cuda]'" in found.why


@pytest.mark.parametrize(
    ("answer", "backend", "why"),
    [
        (("NVIDIA H200", (9, 0), ""), "cuda", "NVIDIA H200 found"),
        (("Tesla T4", (7, 5), ""), "native", "compute capability 7.5: the cuda backend needs 8.0"),
        ((None, (0, 0), "its driver does not answer"), "native", "its driver does not answer"),
    ],
)
def test_torch_has_the_last_word(
    answer: tuple[object, ...], backend: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen(monkeypatch, *answer)
    found = detect(device(tmp_path, "dev/nvidia0"))
    assert found.backend == backend and why in found.why


def test_a_broken_torch_does_not_take_the_cpu_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen(monkeypatch)  # an answer of the wrong shape: a failure like any other
    found = detect(device(tmp_path, "dev/nvidia0"))
    assert found.backend == "native" and "torch cannot be used: ValueError" in found.why


@pytest.mark.parametrize(
    ("backend", "device", "chosen", "line"),
    [
        ("auto", "cpu", "native", "device: cpu (asked for)"),
        ("auto", "cuda:1", "cuda", "device: cuda:1 (asked for)"),
        ("auto", "auto", "cuda", "device: cuda (a test says so)"),
        ("native", "auto", "native", None),
        ("torch", "cuda", "torch", None),
    ],
)
def test_who_asks_gets_what_was_asked(
    backend: str, device: str, chosen: str, line: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("quire.engine.construction.build.detect", lambda: module.Detected("cuda", "a test says so"))
    config, lines = choose_backend(EngineConfig(path="", backend=backend, device=device))
    assert config.backend == chosen and lines == ([line] if line else [])


def test_no_such_device():
    with pytest.raises(BadRequest, match="device is 'tpu'"):
        choose_backend(EngineConfig(path="", device="tpu"))


def test_deciding_imports_no_torch():
    if gpu_devices():
        pytest.skip("needs a machine without a GPU")
    code = "import sys, quire.engine.construction.build as b; from quire.config import EngineConfig\nprint(b.choose_backend(EngineConfig(path=''))[1], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "['device: cpu (no NVIDIA GPU is here)'] False", done.stderr
