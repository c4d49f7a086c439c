"""The CUDA backend: torch with Triton kernels where they measure better. Nothing is imported until it is asked for."""
