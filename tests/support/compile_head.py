"""Compile the Triton kernels of log-probs for GPUs, without one: a JSON line per kernel, format and
compute capability. Run it with TRITON_INTERPRET=0."""

from __future__ import annotations

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from burnish.models.fused_head import BLOCK, WARPS, jit_kernels

TYPES = {"targets": "*i64", "stride": "i32", "vocabulary": "i32"}
NUMBERS = ("scale", "softcap", "per_temperature")
CONSTANTS = {"VOCABULARY": 151_936, "CAPPED": True, "ENTROPY": True, "BLOCK": BLOCK}


def main() -> None:
    for kernel in jit_kernels():
        for dtype in ("bf16", "fp32"):
            for capability in (80, 90):
                target = GPUTarget("cuda", capability, 32)
                compiled = triton.compile(
                    source(kernel, dtype), target=target, options={"num_warps": WARPS}
                )
                loads = [x for x in compiled.asm["ptx"].splitlines() if "ld.global" in x]
                row = {
                    "kernel": kernel.__name__,
                    "dtype": dtype,
                    "capability": capability,
                    "wide_loads": sum("v4" in line for line in loads),
                    "binary": len(compiled.asm["cubin"]),
                }
                print(json.dumps(row))


def source(kernel: object, dtype: str) -> ASTSource:
    """The kernel with arguments as PyTorch makes them: addresses and widths are multiples of 16."""
    names = list(kernel.arg_names)
    types = TYPES | {"outputs": f"*{dtype}"} | dict.fromkeys(NUMBERS, "fp32")
    aligned = [i for i, name in enumerate(names) if name not in (*NUMBERS, *CONSTANTS)]
    return ASTSource(
        kernel,
        {n: "constexpr" if n in CONSTANTS else types.get(n, "*fp32") for n in names},
        constexprs={(i,): CONSTANTS[n] for i, n in enumerate(names) if n in CONSTANTS},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )


if __name__ == "__main__":
    main()
