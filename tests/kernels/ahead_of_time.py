"""Compile a kernel for a GPU that is not there, and read the PTX."""

from __future__ import annotations

from typing import Any

from eightfold.kernels.jit import Kernel, launch_options, triton


def ptx(kernel: Kernel, capability: int, types: dict[str, str], constants: dict[str, Any], **options: int) -> str:
    """PTX of a kernel; pointers and sizes (`*_size`, `k_padded`, `num_blocks`, `stride_x`) count as multiples of 16."""
    names: list[str] = kernel.arg_names  # type: ignore[attr-defined]
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [
        index
        for index, name in enumerate(names)
        if signature[name].startswith("*") or (signature[name] == "i32" and name != "m_size")
    ]
    source = triton.compiler.ASTSource(
        kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    text: str = triton.compile(source, target=target, options={**launch_options(), **options}).asm["ptx"]
    return text
