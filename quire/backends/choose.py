"""The choice of the backend that runs a model. The only file here that knows them all; it imports the one that is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from quire.backends.ops import Backend

NAMES = ("native", "reference", "torch", "cuda")


def open_backend(
    name: str,
    *,
    threads: int = 1,
    isa: str | None = None,
    cores: Sequence[int] = (),
    device: str = "auto",
    dtype: str = "auto",
    random: bool = False,
    deterministic: bool = False,
    quantize: str = "none",
) -> Backend:
    """The backend of that name.

    `cores` is what native threads are pinned to. `device` and `dtype` are for torch ones; `random` gives them numbers
    without a file; `quantize` is what their matrices become. `deterministic` is a mode of cuda; native is so anyway, the
    others cannot be.
    """
    if name == "native":
        from quire.backends.native.backend import NativeBackend

        return NativeBackend(threads=threads, isa=isa, cores=cores)
    if name == "reference":
        from quire.backends.reference.backend import ReferenceBackend

        return ReferenceBackend()
    if name == "torch":
        from quire.backends.torch.backend import TorchBackend

        return TorchBackend(device, dtype, threads=threads, random=random, quantize=quantize)
    if name == "cuda":
        if device != "cpu":  # which is Triton's interpreter
            from quire.backends.torch.backend import pick_device

            pick_device("cuda" if device == "auto" else device)  # no GPU is said before Triton is loaded for nothing
        if deterministic:
            from quire.backends.cuda.deterministic import DeterministicBackend

            return DeterministicBackend(device, dtype, threads=threads, random=random)
        from quire.backends.cuda.backend import CudaBackend

        return CudaBackend(device, dtype, threads=threads, random=random, quantize=quantize)
    raise ValueError(f"no backend named {name!r}: there are {', '.join(NAMES)}")
