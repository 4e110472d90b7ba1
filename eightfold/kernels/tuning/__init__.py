"""How a product is cut into programs: a rule for any shape, and measured exceptions for each GPU.

The rule follows from what bounds the product. Few tokens: one program on each multiprocessor with as much in flight as its
shared memory holds, or two with half of that where the weight has more tiles than the GPU has multiprocessors. More tokens: the
smallest tile whose grid still fits the GPU at once, since small tiles use more multiprocessors and large ones read each operand
less often. Beyond that, the library's product, whose tiles hand over to each other without a pause.

The tables in this folder hold, for one GPU, the shapes at which something else was measured to be faster by 2 % or more.
`scripts/tune_gemm.py` writes them. Nothing is tuned while requests are served.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TABLES = Path(__file__).parent
# Numbers of tokens that are measured. One in between goes by the next larger, one beyond them by the last.
BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How one product is cut into programs.

    Attributes:
        kernel: "tile" (`gemm.fold_gemm`) or "library" (`gemm.library_gemm`, which ignores the rest).
        block_n: rows of W in a tile.
        block_m: tokens in a tile.
        block_k: elements along K in one step.
        num_stages: steps whose loads are in flight.
        num_warps: warps of a program.
        prefetch: bytes of each row of W that a program asks for while the kernel ahead of it still runs; a power of two or 0.
    """

    kernel: str
    block_n: int = 0
    block_m: int = 0
    block_k: int = 0
    num_stages: int = 0
    num_warps: int = 0
    prefetch: int = 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the stages in flight."""
        return self.num_stages * self.block_k * (self.block_n + self.block_m)


LIBRARY = TileConfig("library")


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the rule needs to know of a GPU.

    Attributes:
        name: as the driver gives it, such as "NVIDIA H200"; tables go by it.
        num_sms: multiprocessors.
        shared_bytes: shared memory that one program can have.
        copy_engine: whether tiles are loaded by a unit of its own (compute capability 9.0 and up). Without it triton makes
            their loads plain ones that it does not overlap, and the library goes first.
    """

    name: str
    num_sms: int
    shared_bytes: int
    copy_engine: bool


@functools.cache
def choose_config(gpu: Gpu, n: int, k: int, num_tokens: int, *, library: bool) -> TileConfig:
    """The configuration of a product of N x K for this many tokens.

    Args:
        library: whether `torch._scaled_mm` takes this product (bf16 results, N a multiple of 16).
    """
    if library and not gpu.copy_engine:
        return LIBRARY
    bucket = next((size for size in BUCKETS if num_tokens <= size), BUCKETS[-1])
    config = load_table(gpu.name).get((n, k, bucket))
    if config is None or (config.kernel == "library" and not library):
        config = rule(n, num_tokens, gpu.num_sms, library=library)
    return fit(config, gpu.shared_bytes)


def rule(n: int, num_tokens: int, num_sms: int, *, library: bool) -> TileConfig:
    """The configuration for a shape that no table holds; arguments as in `choose_config`."""
    rounds = -(-n // 64 // num_sms)  # of 64 rows of W on every multiprocessor
    if num_tokens <= 16:
        return TileConfig("tile", 64, 16, 512 if rounds == 1 else 256, 4, 4, 512)
    if num_tokens <= 32:
        return TileConfig("tile", 64, 32, 256, 6 if rounds == 1 else 4, 4, 1024)
    if num_tokens <= 64:
        return {
            1: TileConfig("tile", 64, 64, 256, 6, 4, 1024),
            2: TileConfig("tile", 64, 64, 128, 6, 4, 1024),
        }.get(rounds, TileConfig("tile", 128, 64, 128, 4, 4, 1024))
    ladder = (
        TileConfig("tile", 64, 64, 256, 5, 4, 1024),
        TileConfig("tile", 64, 128, 128, 8, 4, 1024),
        TileConfig("tile", 128, 128, 128, 6, 8),
        TileConfig("tile", 128, 256, 128, 4, 8),
    )
    for config in ladder:
        if -(-n // config.block_n) * -(-num_tokens // config.block_m) <= num_sms:
            return config
    return LIBRARY if library else ladder[-1]


def fit(config: TileConfig, shared_bytes: int) -> TileConfig:
    """The same with fewer stages, and then smaller steps, until it fits a program's shared memory."""
    # The result is staged through shared memory too, and barriers need a little.
    room = shared_bytes - 2048
    while config.shared_bytes > room and config.num_stages > 2:
        config = replace(config, num_stages=config.num_stages - 1)
    while config.shared_bytes > room and config.block_k > 64:
        config = replace(config, block_k=config.block_k // 2)
    return config


@functools.cache
def load_table(gpu_name: str) -> dict[tuple[int, int, int], TileConfig]:
    """Exceptions to the rule on one GPU, by N, K and bucket of tokens; empty for a GPU that has no table."""
    path = TABLES / f"{gpu_name.lower().replace(' ', '_')}.json"
    if not path.exists():
        return {}
    entries: list[dict[str, Any]] = json.loads(path.read_text())["exceptions"]
    return {(entry["n"], entry["k"], entry["tokens"]): TileConfig(**entry["config"]) for entry in entries}
