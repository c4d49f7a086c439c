"""The CUDA backend's kernels, in Triton: one small file per kernel, plain functions on torch tensors.

Every function writes into tensors it is given, keeps nothing between calls, never waits for the device, and launches a
grid that depends on shapes and host-side bounds alone: a captured graph replays it with other contents. Index tensors
are int32. Configurations come from small static tables; nothing is tuned while serving.

The cache of one layer is [pages, 16, kv_heads, head_dim] for keys and the same for values; batch arrays are those of
`quire/backends/batch.py` on the device. Nothing here knows a model, a scheduler or a program.
"""
