"""Where weights come from: model files (`gguf`, `safetensors` in a `folder`), a model's checked view of one (`tensors`), and
the local store of them.

Files are hostile until checked. This room hands out layouts; it knows no kernels and no model's mathematics.
"""
