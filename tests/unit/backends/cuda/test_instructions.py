"""What the deterministic mode's kernels become on Hopper, compiled here without a GPU: every tile by the same instructions.

Equal bits between tiles rest on it: warpgroup products of 64 weights, 16 of k at a time, into float32. That the numbers
then are equal is for tests/gpu/test_deterministic.py to say.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from quire.backends.cuda.kernels import attention, product

def instructions(kernel, types, flags, tile):
    kernel = getattr(kernel, "_kernel", kernel)  # what a Launcher launches
    names = kernel.arg_names
    kinds = {n: "constexpr" if n in flags else types.get(n, "i32") for n in names}
    aligned = [i for i, n in enumerate(names) if kinds[n].startswith("*") or n.startswith("stride") or n in "nk"]
    source = ASTSource(
        kernel, kinds, {(names.index(n),): v for n, v in flags.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned if kinds[names[i]] != "constexpr"},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tile.warps, "num_stages": tile.stages})
    return sorted(set(re.findall(r"wgmma\\.mma_async\\S*\\.(m\\d+n\\d+k\\d+\\S*)|(mma\\.sync\\S+)", made.asm["ptx"])))

half, found = "*bf16", {}
for tile in product.TILES:
    for apart in {False, tile.apart}:
        flags = {"BLOCK_M": tile.rows, "BLOCK_N": tile.channels, "BLOCK_K": product.BLOCK_K, "SEGMENT": product.SEGMENT,
                 "SEGMENTS": 2, "APART": apart, "GROUP": 8, "BIAS": False, "RESIDUAL": False, "EVEN": True, "IEEE": False,
                 "HEADS": 1, "PDL": True}
        types = {"x": half, "w": half, "y": half, "part": "*fp32", "residual": half, "bias": half}
        found[f"product {tile.rows} {apart}"] = instructions(product._product, types, flags, tile)
for name in ("INVARIANT", "INVARIANT_TALL"):
    tile = getattr(attention, name)
    flags = {"GROUP": 4, "GROUP_PAD": 4, "D": 128, "D_PAD": 128, "PAGE": 16, "BLOCK_Q": tile.rows // 4,
             "BLOCK_N": tile.block_n, "SEQ_PAD": 16, "UNIFORM": False, "CAUSAL": True, "WINDOW": False, "SOFTCAP": False,
             "SINKS": False, "BEGIN": False, "SCALED": False, "SPLIT": 512, "PARTIAL": False, "PDL": True}
    floats = ("part", "lse", "sums", "sinks", "k_scale", "v_scale")
    types = {n: half for n in ("q", "k_cache", "v_cache", "out")} | {n: "*fp32" for n in floats}
    types |= {n: "*i32" for n in ("table", "q_start", "kv_len", "kv_begin", "pos")} | {"scale": "fp32", "softcap": "fp32"}
    found[name] = instructions(attention._attend, types, flags, tile)
print(json.dumps(found))
"""


@pytest.mark.large
def test_every_tile_is_made_of_the_same_instructions(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=600)
    if done.returncode and "ptxas" in done.stderr:
        pytest.skip("needs the assembler that comes with triton's Linux wheels")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    for name, kinds in found.items():
        shapes = [wgmma for wgmma, mma in kinds if not mma]
        assert len(shapes) == len(kinds) > 0, f"{name}: {kinds}"
        assert all(s.startswith("m64n") and "k16.f32.bf16.bf16" in s for s in shapes), f"{name}: {kinds}"
    assert found["INVARIANT"] == found["INVARIANT_TALL"]
    assert found["product 16 True"] == found["product 16 False"]
