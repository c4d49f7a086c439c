"""The CUDA backend: the torch backend with Triton kernels for what is hot, and programs that graphs may replay.

It gives programs other kernels (ops.py) and nothing else: recording, weights, batches and programs are inherited.
Where there is no GPU the same code runs in Triton's interpreter, for tests.
"""

from __future__ import annotations

import torch
import triton
from triton import knobs  # pyright: ignore[reportAttributeAccessIssue]

from quire.backends.cuda.adapters import FixedStacks
from quire.backends.cuda.elementwise import OWN
from quire.backends.cuda.kernels import attention, fp8
from quire.backends.cuda.kernels.gates import KINDS
from quire.backends.cuda.kernels.launch import compile_only
from quire.backends.cuda.ops import CudaKernels
from quire.backends.cuda.tiles import library_takes
from quire.backends.torch.backend import TorchBackend, TorchProgram
from quire.observe.errors import Unsupported


class CudaBackend(TorchBackend):
    """Programs on one NVIDIA GPU."""

    name = "cuda"
    shares = True  # whether its programs read a prefix that rows share once
    packs = True  # whether four-bit codes are multiplied as they lie
    kernels = CudaKernels
    stacks = FixedStacks

    def __init__(
        self,
        device: str = "auto",
        dtype: str = "auto",
        *,
        threads: int | None = None,
        random: bool = False,
        quantize: str = "none",
    ):
        device = "cuda" if device == "auto" else device
        super().__init__(device, dtype, threads=threads, random=random, quantize=quantize)
        if self.device.type != "cuda" and not knobs.runtime.interpret:
            raise Unsupported("the cuda backend needs an NVIDIA GPU", cure="use --backend torch --device cpu")
        if self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) < (8, 9):
            self.kv_dtypes = tuple(name for name in self.kv_dtypes if name != "fp8")
            self.weights.float8 = False
            if quantize in ("fp8", "fp8-block"):
                raise Unsupported(
                    f"{torch.cuda.get_device_name(self.device)} has no fp8 arithmetic",
                    cure="use --quantize int8, or --backend torch",
                )
        # Their kernels multiply bfloat16; the interpreter, which has none, takes float16 for it.
        self.weights.words = self.packs and self.dtype == (torch.float16 if knobs.runtime.interpret else torch.bfloat16)
        if quantize in ("fp8", "keep"):  # asked now, not while a graph is captured
            for kind in (torch.float16, torch.float32):
                fp8.gives(kind, self.device)
        if quantize in ("fp8-block", "keep"):
            library_takes(self.dtype, self.device)

    def wrap(self, program: TorchProgram) -> TorchProgram:
        program.graphs = self.device.type == "cuda"
        program.shares = self.shares
        program.adapts = program.has_targets
        program.compile_only = compile_only
        return program

    def computes(self) -> str:
        """Triton compiles the kernels."""
        return f"{super().computes()}, triton {triton.__version__}"

    def implementations(self) -> dict[str, str]:
        own = ("rms_norm", "layer_norm", "attention", "latent_attention", "encode", "moe")
        own += ("conv", "delta_rule", "adapt", *OWN, *filter(None, KINDS))
        hot = dict.fromkeys(own, "Triton")
        if self.device.type == "cuda" and torch.cuda.get_device_capability(self.device)[0] == 9:
            hot["attention"] += (
                " (prompts: Gluon)" if attention.prompts() else " (this version lacks what prompts need)"
            )
        hot |= {"linear": "cuBLAS", "head_linear": "cuBLAS", "rope": "Triton (with the KV write)"}
        return super().implementations() | hot
