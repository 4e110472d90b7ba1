"""The CPU's kernels on every instruction set of this machine, against products in fp64 and against the reference.

An oracle takes the operands that the kernel got: weights as stored, dequantized, and activations as rounded. So a bound is the
kernel's own accumulation and the rounding of its result, and the format's error has no part in it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from eightfold.errors import InputError
from eightfold.kernels import native
from eightfold.kernels.cpu import CpuAttention, CpuFused, CpuLinear
from eightfold.kernels.hardware import detect
from eightfold.kernels.operations import AttentionMetadata, AttentionSpec, LinearSpec
from eightfold.kernels.reference import ReferenceAttention, ReferenceFused
from eightfold.kernels.registry import Hardware
from eightfold.quant.mxfp8 import MXTensor, dequantize, quantize
from tests.oracle import mismatch
from tests.tolerances import OF_DTYPE

LIBRARY = native.status().library
pytestmark = pytest.mark.skipif(LIBRARY is None, reason=native.status().detail)

DTYPES = (torch.float32, torch.bfloat16)
FORMATS = ("mxfp8", "bfloat16", "float16", "float32")
FUSED, REFERENCE = CpuFused(), ReferenceFused()


@pytest.fixture(params=[] if LIBRARY is None else LIBRARY.available())
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn."""
    assert LIBRARY is not None
    before = LIBRARY.current()
    LIBRARY.use(request.param)
    yield request.param
    LIBRARY.use(before)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Outputs are NaN until a kernel writes them, and so are the workspaces that it takes over from an earlier call."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small work on shared cores; one test of its own compares numbers of threads
    torch.use_deterministic_algorithms(True)  # with fill_uninitialized_memory, which is on by default
    assert torch.ones(1).new_empty((3,)).isnan().all()
    linear = CpuLinear()
    nan = torch.full((130, 4095), torch.nan)
    linear.run(nan, linear.prepare(nan[:4], None))
    nan = torch.full((1, 64, 128), torch.nan)
    attend(nan, nan[0, 0].expand(300, 2, 1, 128), [(1, 300)], num_heads=64, num_kv_heads=1)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def agree(found: Tensor, expected: Tensor, magnitude: Tensor | None = None) -> bool:
    """Whether a result is the exact one within the tolerance of its dtype; `magnitude` sums what went into each element."""
    return mismatch(found, expected, OF_DTYPE[found.dtype], magnitude) is None


def stored(weight: Tensor, weight_format: str) -> MXTensor | Tensor:
    return quantize(weight) if weight_format == "mxfp8" else weight.to(getattr(torch, weight_format))


def values(weight: MXTensor | Tensor) -> Tensor:
    return (dequantize(weight) if isinstance(weight, MXTensor) else weight).double()


def product(x: Tensor, weight: MXTensor | Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The fp64 product, and the sum of magnitudes behind each element."""
    shift = torch.zeros(1) if bias is None else bias
    return (
        x.double() @ values(weight).T + shift.double(),
        x.double().abs() @ values(weight).abs().T + shift.double().abs(),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("k", [1, 31, 32, 33, 576, 1856, 4100])
def test_linear(instructions: str, weight_format: str, dtype: torch.dtype, k: int) -> None:
    linear = CpuLinear()
    x, bias = randn(129, k, seed=3).to(dtype), randn(129, seed=2)
    # Rows of very different size, as trained weights have.
    weight = stored(randn(129, k) * randn(129, 1, seed=1).exp(), weight_format)
    for n in (1, 7, 127, 129):
        for shift in (None, bias[:n]):
            expected, magnitude = product(x, weight[:n], shift)
            prepared = linear.prepare(weight[:n], shift)
            for m in (1, 2, 3, 7, 17, 129):
                found = linear.run(x[:m], prepared)
                assert found.dtype == dtype
                assert agree(found, expected[:m], magnitude[:m]), (m, n)


@pytest.mark.parametrize(("m", "n"), [(1, 1536), (513, 100)])
def test_linear_of_many_rows_and_of_many_tokens(instructions: str, m: int, n: int) -> None:
    linear = CpuLinear()
    weight, x = quantize(randn(n, 576)), randn(m, 576, seed=1)
    assert agree(linear.run(x, linear.prepare(weight, None)), *product(x, weight, None))


@pytest.mark.parametrize("m", [1, 7])
def test_every_element_and_every_scale(instructions: str, m: int) -> None:
    """All finite E4M3 numbers, then all scales, alone in a row: exact, since one product is not rounded."""
    linear = CpuLinear()
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn).reshape(-1, 1)
    scales = torch.arange(255, dtype=torch.uint8).reshape(-1, 1)
    elements = MXTensor(codes, torch.full((len(codes), 1), 130, dtype=torch.uint8))
    powers = MXTensor(torch.full((255, 1), 0.375).to(torch.float8_e4m3fn), scales)
    for weight in (elements, powers):
        found = linear.run(torch.ones(m, 1), linear.prepare(weight, None))
        assert torch.equal(found, dequantize(weight).T.expand(m, -1))


@pytest.mark.parametrize("m", [1, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_oracle_of_linear_fails_planted_faults(m: int, dtype: torch.dtype) -> None:
    linear = CpuLinear()
    weight, x = quantize(randn(129, 576)), randn(m, 576, seed=1).to(dtype)
    expected, magnitude = product(x, weight, None)
    right = linear.run(x, linear.prepare(weight, None))
    assert agree(right, expected, magnitude)
    short = x.clone()
    short[:, -32:] = 0
    louder = MXTensor(weight.data, weight.scale.clone())
    louder.scale[5, 3] += 1
    swapped = right.clone()
    swapped[:, [3, 4]] = right[:, [4, 3]]
    emptied = right.clone()
    emptied[:, 7] = 0
    faults = {
        "doubled": right * 2,
        "times 1.02": (right.double() * 1.02).to(dtype),
        "last block of K dropped": linear.run(short, linear.prepare(weight, None)),
        "one scale doubled": linear.run(x, linear.prepare(louder, None)),
        "two outputs swapped": swapped,
        "an output zero": emptied,
    }
    assert [name for name, wrong in faults.items() if agree(wrong, expected, magnitude)] == []


def test_linear_keeps_the_weight_in_place() -> None:
    weight = quantize(randn(64, 576))
    prepared = CpuLinear().prepare(weight, None)
    assert (prepared.data, prepared.scale) == (weight.data.data_ptr(), weight.scale.data_ptr())


def test_linear_refuses_nan_in_a_weight() -> None:
    weight = quantize(randn(4, 64))
    weight.scale[1, 1] = 255
    with pytest.raises(InputError, match=r"\[4, 64\].*NaN"):
        CpuLinear().prepare(weight, None)
    weight = quantize(randn(4, 64))
    weight.data.view(torch.uint8)[3, 63] = 0xFF
    with pytest.raises(InputError, match=r"\[4, 64\].*NaN"):
        CpuLinear().prepare(weight, None)


def attend(
    query: Tensor,
    tokens: Tensor,
    chunks: list[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    block_size: int = 16,
    window: int | None = None,
    reference: bool = False,
) -> Tensor:
    """Attention of chunks (query tokens, context tokens) over a cache with scattered blocks, NaN where no token is.

    `tokens` `[at least all context tokens, 2 or more, num_kv_heads, head_dim]`, or one that broadcasts, holds keys and values.
    """
    head_dim = query.shape[-1]
    counts = [-(-context // block_size) for _, context in chunks]
    order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(5))
    caches = torch.full((2, sum(counts) + 1, block_size, num_kv_heads, head_dim), torch.nan).to(query.dtype)
    tables = torch.zeros(len(chunks), max(counts), dtype=torch.int32)
    used, read = 0, 0
    for index, (_, context) in enumerate(chunks):
        table = order[used : used + counts[index]]
        tables[index, : counts[index]] = table
        used += counts[index]
        for which in range(2):
            flat = caches[which][table].flatten(0, 1)
            flat[:context] = tokens[read : read + context, which]
            caches[which][table] = flat.unflatten(0, (-1, block_size))
        read += context
    lengths = torch.tensor(chunks, dtype=torch.int32)
    starts = torch.zeros(len(chunks) + 1, dtype=torch.int32)
    starts[1:] = lengths[:, 0].cumsum(0)
    metadata = AttentionMetadata(
        slot_mapping=torch.empty(0, dtype=torch.int64),
        block_tables=tables,
        query_start=starts,
        context_lens=lengths[:, 1].contiguous(),
        max_query_len=int(lengths[:, 0].max()),
        max_context_len=int(lengths[:, 1].max()),
    )
    spec = AttentionSpec(num_heads, num_kv_heads, head_dim, head_dim**-0.5, window, query.dtype)
    if reference:
        return ReferenceAttention().run(query.double().float(), caches[0].float(), caches[1].float(), metadata, spec)
    return CpuAttention().run(query, caches[0], caches[1], metadata, spec)


# Decode, short and long chunks, prefill from nothing, and all in one batch; a context of more than one part of 256 keys.
CHUNKS = ([(1, 1)], [(1, 700), (5, 5), (1, 33), (129, 300), (3, 900)], [(40, 40), (1, 257)])
SHAPES = (
    (9, 3, 64, 16, None),
    (4, 4, 7, 3, None),
    (8, 1, 80, 16, 40),
    (6, 2, 128, 32, 5),
    (3, 1, 96, 8, None),
    (64, 1, 64, 16, None),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "block_size", "window"), SHAPES)
def test_attention(
    instructions: str, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    for chunks in CHUNKS:
        num_tokens, context = (sum(column) for column in zip(*chunks, strict=True))
        fused = randn(num_tokens, num_heads + 2, head_dim).to(dtype)
        query = fused[:, :num_heads]  # a view of a fused qkv
        tokens = randn(context, 2, num_kv_heads, head_dim, seed=1).to(dtype)
        found, expected = (
            attend(
                query,
                tokens,
                chunks,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                block_size=block_size,
                window=window,
                reference=reference,
            )
            for reference in (False, True)
        )
        assert agree(found, expected), chunks


def test_the_oracle_of_attention_fails_planted_faults() -> None:
    query, tokens = randn(5, 4, 64), randn(80, 2, 2, 64, seed=1)
    expected = attend(query, tokens, [(5, 80)], num_heads=4, num_kv_heads=2, reference=True)
    assert agree(attend(query, tokens, [(5, 80)], num_heads=4, num_kv_heads=2), expected)
    unequal = tokens.clone()
    unequal[40, 0] *= 1.5
    faults = {
        "a window": attend(query, tokens, [(5, 80)], num_heads=4, num_kv_heads=2, window=79),
        "heads grouped in turn": attend(query[:, [0, 2, 1, 3]], tokens, [(5, 80)], num_heads=4, num_kv_heads=2),
        "keys for values": attend(query, tokens.flip(1), [(5, 80)], num_heads=4, num_kv_heads=2),
        "one key longer": attend(query, unequal, [(5, 80)], num_heads=4, num_kv_heads=2),
        "a key too few": attend(query[1:], tokens, [(4, 79)], num_heads=4, num_kv_heads=2),
    }
    assert [name for name, wrong in faults.items() if agree(wrong, expected[1:] if len(wrong) == 4 else expected)] == []


def test_results_depend_neither_on_threads_nor_on_the_run(instructions: str) -> None:
    linear = CpuLinear()
    weight = linear.prepare(quantize(randn(1000, 576)), None)
    tokens = randn(1400, 2, 3, 64, seed=1)
    results = []
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        decode, prefill = (linear.run(randn(m, 576, seed=2), weight) for m in (1, 200))
        attention = attend(randn(131, 9, 64), tokens, [(1, 1000), (130, 400)], num_heads=9, num_kv_heads=3)
        results.append(torch.cat((decode.flatten(), prefill.flatten(), attention.flatten())))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("width", [1, 7, 127, 576, 1856])
def test_norms(instructions: str, dtype: torch.dtype, weight_dtype: torch.dtype, width: int) -> None:
    x, residual = randn(5, width).to(dtype) * 3, randn(5, width, seed=1).to(dtype)
    weight = randn(width, seed=2).to(weight_dtype)
    assert agree(FUSED.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x.float(), weight, 1e-5))
    given = residual.clone()
    normed, total = FUSED.add_rms_norm(x, given, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert total.data_ptr() == given.data_ptr()
    assert agree(normed, REFERENCE.rms_norm(total.float(), weight, 1e-5))


def test_rms_norm_of_heads_and_of_many_tokens(instructions: str) -> None:
    x = randn(300, 9, 128)[:, :, :64]  # not contiguous
    weight = randn(64, seed=1)
    found = FUSED.rms_norm(x, weight, 1e-5)
    assert found.shape == x.shape
    assert agree(found, REFERENCE.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [2, 34, 64])
def test_rotary_and_write_kv(instructions: str, dtype: torch.dtype, rotary_dim: int) -> None:
    num_tokens = 200
    query, key, value = randn(num_tokens, 15, 64).to(dtype).split([9, 3, 3], dim=1)  # views of a fused qkv
    table = randn(50, rotary_dim, seed=1)
    positions = torch.arange(num_tokens).flip(0) % 50
    expected = REFERENCE.rotary(query.float(), key.float(), table, positions)
    found = FUSED.rotary(query, key, table, positions)
    assert all(agree(*pair) for pair in zip(found, expected, strict=True))

    caches = torch.full((2, 60, 4, 3, 64), torch.nan).to(dtype)
    slots = torch.randperm(240, generator=torch.Generator().manual_seed(2))[:num_tokens]
    same = caches.clone()
    FUSED.write_kv(found[1], value, caches[0], caches[1], slots)
    REFERENCE.write_kv(found[1], value, same[0], same[1], slots)
    assert torch.equal(caches.nan_to_num(7.0), same.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 127, 1536])
def test_silu_and_mul(instructions: str, dtype: torch.dtype, width: int) -> None:
    x = (randn(17, 2 * width) * 20).to(dtype)
    x[0, 0], x[1, 0] = 200.0, -200.0  # past the range of the exponential
    assert agree(FUSED.silu_and_mul(x), REFERENCE.silu_and_mul(x.float()))
    swapped = torch.cat(x.chunk(2, dim=1)[::-1], dim=1)
    assert not agree(FUSED.silu_and_mul(swapped), REFERENCE.silu_and_mul(x.float()))


def test_no_tokens(instructions: str) -> None:
    linear = CpuLinear()
    assert linear.run(torch.empty(0, 64), linear.prepare(quantize(randn(7, 64)), None)).shape == (0, 7)
    assert FUSED.silu_and_mul(torch.empty(0, 64)).shape == (0, 32)
    assert FUSED.rms_norm(torch.empty(0, 64), torch.ones(64), 1e-5).shape == (0, 64)


def test_declines_say_why() -> None:
    linear, here = CpuLinear(), detect("cpu")
    gpu = Hardware(torch.device("cuda"), "a GPU", (9, 0), frozenset(), 0, 1)
    spec = LinearSpec("layer", 8, 8, "mxfp8", torch.float32)
    assert linear.declines(spec, here) is None
    assert linear.declines(spec, gpu) == "device is cuda"
    assert linear.declines(LinearSpec("layer", 8, 8, "int4", torch.float32), here) == "int4 weights"
    assert linear.declines(LinearSpec("layer", 8, 8, "mxfp8", torch.float64), here) == "float64 activations"
    assert FUSED.declines(torch.float16, here) == "float16 activations"
    assert CpuAttention().declines(AttentionSpec(4, 2, 64, 1.0, None, torch.bfloat16), here) is None


def test_every_backend_declines_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "status", lambda: native.Status(None, "the native library was not built"))
    here = Hardware(torch.device("cpu"), "a CPU", None, frozenset(), 0, 1)
    assert FUSED.declines(torch.float32, here) == "the native library was not built"
