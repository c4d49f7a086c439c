"""The torch backend: a model's forward is recorded once and run over tensors of any torch device.

  fuse.py      passes over the recorded instructions: linears that share an input, gate and up, add and norm, rope and KV
  emit.py      an instruction becomes a step that calls one kernel; which weights that needs
  weights.py   layouts become tensors of the compute dtype, each once
  batch.py     the ragged batch as tensors
  kernels.py   every op in plain torch; another device overrides what it does better
  experts.py   a mixture of experts in plain torch: who is chosen, and rows grouped by expert
  backend.py   programs: run (numpy in, numpy out) and launch (tensors, nothing waited for)

Nothing is imported here, so that asking for the package costs nothing.
"""
