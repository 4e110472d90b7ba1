"""The GPU's kernels for the small operations: what is compiled, and results against the reference in fp64 or fp32."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eightfold.kernels import fused, jit
from eightfold.kernels.cuda_fused import TritonFused
from eightfold.kernels.operations import Routing
from eightfold.kernels.reference import ReferenceFused
from tests.kernels.ahead_of_time import ptx
from tests.oracle import assert_matches
from tests.tolerances import FP32, OF_DTYPE

gpu_test = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_triton = pytest.mark.skipif(jit.MISSING is not None, reason="needs triton")
FUSED, REFERENCE = TritonFused(), ReferenceFused()
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EPS = 1e-5
ROUTINGS = [
    Routing(8, 2, "softmax", normalize=True),
    Routing(60, 4, "softmax", normalize=False, scale=1.5),
    Routing(128, 6, "sigmoid", normalize=True, scale=2.5),
    Routing(60, 6, "sigmoid", normalize=True, num_groups=6, topk_groups=3),
    Routing(256, 8, "sigmoid", normalize=True, scale=2.5, num_groups=8, topk_groups=4),
    Routing(512, 22, "sigmoid", normalize=False),
    Routing(20, 20, "softmax", normalize=True),
]


def randn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def check_rounded(found: Tensor, expected: Tensor, magnitude: Tensor | None = None) -> None:
    """`found` is `expected` rounded to its dtype, where magnitudes are those that a sum in fp32 had."""
    magnitude = expected.abs() if magnitude is None else magnitude
    # Below 2^-14 fp16 has a fixed step of 2^-24, half of which is the accumulation's share of this.
    floor = 0.05 if found.dtype == torch.float16 else 0.0
    assert_matches(found, expected, OF_DTYPE[found.dtype], magnitude + floor)


def check_norms(width: int, dtype: torch.dtype, device: str) -> None:
    for rows, weight_dtype in ((1, dtype), (7, torch.float32)):
        x, residual = (randn(rows, 2 * width, dtype=dtype, device=device, seed=seed)[:, :width] for seed in (0, 1))
        weight = randn(width, dtype=weight_dtype, device=device, seed=2)
        total = x + residual
        expected = REFERENCE.rms_norm(x.double(), weight, EPS)
        check_rounded(FUSED.rms_norm(x, weight, EPS), expected)
        expected = REFERENCE.rms_norm(total.double(), weight, EPS)
        normed, added = FUSED.add_rms_norm(x, residual, weight, EPS)
        check_rounded(normed, expected)
        assert torch.equal(added, total)


def check_norms_of_heads(dtype: torch.dtype, device: str) -> None:
    """Of queries that are a view of a fused projection, of a vector, and of more dimensions."""
    x, weight = randn(5, 12, 96, dtype=dtype, device=device)[:, 2:9], randn(96, dtype=dtype, device=device)
    for part in (x, x[0, 0], x.unflatten(0, (1, 5))):
        expected = REFERENCE.rms_norm(part.double(), weight, EPS)
        check_rounded(FUSED.rms_norm(part, weight, EPS), expected)


def check_gated_norms(groups: int, group_size: int, dtype: torch.dtype, device: str) -> None:
    width = groups * group_size
    fused_rows = randn(6, 2 * width + 32, dtype=dtype, device=device)
    x, gate = fused_rows[:, :width], fused_rows[:, width : 2 * width]
    weight = randn(width, device=device)
    product = x.double() * torch.nn.functional.silu(gate.double())
    mean_square = product.unflatten(1, (groups, group_size)).square().mean(dim=-1, keepdim=True)
    expected = (product.unflatten(1, (groups, group_size)) / (mean_square + EPS).sqrt()).flatten(1) * weight.double()
    found = FUSED.gated_rms_norm(x, gate, weight, EPS, group_size)
    check_rounded(found, expected, 4 * expected.abs())


def check_rotary(head_dim: int, rotary_dim: int, dtype: torch.dtype, device: str) -> None:
    num_heads, num_kv_heads = 9, 3
    heads = randn(6, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device=device)
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    untouched = value.clone()
    angles = randn(50, rotary_dim // 2).double()
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).float().to(device)
    positions = torch.tensor([3, 1, 49, 0, 7, 7], device=device)
    expected = [_rotated(x, cos_sin[positions].double()) for x in (query, key)]
    found = FUSED.rotary(query, key, cos_sin, positions)
    for result, (exact, magnitude) in zip(found, expected, strict=True):
        check_rounded(result, exact, magnitude)
    assert torch.equal(value, untouched)


def _rotated(x: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]
    first, second, rest = x.double().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    exact = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    either = (first * cos).abs() + (second * sin).abs(), (second * cos).abs() + (first * sin).abs()
    return exact, torch.cat((*either, rest.abs()), dim=-1)


def check_activations(rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    x = 3 * randn(rows, 2 * width + 16, dtype=dtype, device=device)[:, : 2 * width]
    gate, up = x.double().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    check_rounded(FUSED.silu_and_mul(x), expected, 4 * expected.abs())
    expected = x.double().relu().square()
    check_rounded(FUSED.relu2(x), expected)


def check_write_kv(num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
    heads = randn(5, 9 + 2 * num_kv_heads, head_dim, dtype=dtype, device=device)
    key, value = heads[:, 9 : 9 + num_kv_heads], heads[:, 9 + num_kv_heads :]
    slots = torch.tensor([3, 31, 0, 17, 8], device=device)
    for key_part in (key, key.transpose(0, 1).contiguous().transpose(0, 1)):
        caches = [randn(4, 8, num_kv_heads, head_dim, dtype=dtype, device=device, seed=seed) for seed in (1, 2)]
        expected = [cache.clone() for cache in caches]
        FUSED.write_kv(key_part, value, caches[0], caches[1], slots)
        REFERENCE.write_kv(key_part, value, expected[0], expected[1], slots)
        assert all(torch.equal(found, exact) for found, exact in zip(caches, expected, strict=True))


def check_route(
    routing: Routing, num_tokens: int, hidden: int, dtype: torch.dtype, gate_dtype: torch.dtype, device: str
) -> None:
    """The same experts as an fp64 router's, and weights as exact as fp32."""
    x = randn(num_tokens, hidden + 16, dtype=dtype, device=device)[:, :hidden]
    gate = (randn(routing.num_experts, hidden, device=device, seed=1) / hidden**0.5).to(gate_dtype)
    for bias in (None, randn(routing.num_experts, device=device, seed=2) / 10):
        ids, weights = FUSED.route(x, gate, bias, routing)
        expected_ids, expected = route_exactly(x, gate, bias, routing)
        assert ids.dtype == torch.int64
        assert torch.equal(ids, expected_ids)
        assert_matches(weights, expected, FP32, 4 * expected.abs())


def route_exactly(x: Tensor, gate: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """The formulas of `Routing` in fp64; nothing ties there."""
    logits = x.double() @ gate.double().T
    scores = logits.softmax(dim=-1) if routing.scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias.double()
    if routing.num_groups > 1:
        groups = choice.unflatten(1, (routing.num_groups, -1))
        kept = groups.topk(2, dim=-1).values.sum(dim=-1).topk(routing.topk_groups, dim=-1).indices
        out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(1, kept, False)
        choice = groups.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(1)
    ids = choice.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if routing.normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids, weights * routing.scale


def check_ties(device: str) -> None:
    """Of equal scores the lower id wins, among groups and among experts."""
    x, gate = torch.ones(3, 16, device=device), torch.ones(20, 16, device=device)
    gate[13:15] = 2.0
    ids, _ = FUSED.route(x, gate, None, Routing(20, 5, "sigmoid", normalize=True))
    assert ids.tolist() == [[13, 14, 0, 1, 2]] * 3
    ids, weights = FUSED.route(x, gate, None, Routing(20, 5, "softmax", normalize=True, num_groups=4, topk_groups=2))
    assert ids.tolist() == [[13, 14, 0, 1, 2]] * 3
    assert torch.equal(weights[:, 0], weights[:, 1])
    gate[:] = 0.0
    ids, weights = FUSED.route(x, gate, None, Routing(20, 4, "softmax", normalize=True))
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    assert weights.tolist() == [[0.25] * 4] * 3


COMPILED: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
    (
        fused.rms_norm_kernel,
        dict.fromkeys(("x_ptr", "other_ptr", "weight_ptr", "out_ptr"), "*bf16") | {"eps": "fp32"},
        {"mode": "add", "inner": 1, "size": 16384, "rows": 1, "block": 16384},
    ),
    (
        fused.rotary_kernel,
        {"q_ptr": "*bf16", "k_ptr": "*bf16", "cos_sin_ptr": "*fp32", "positions_ptr": "*i64"},
        {"num_heads": 32, "num_kv_heads": 8, "half": 64, "heads": 16, "block": 64},
    ),
    (fused.activation_kernel, {"x_ptr": "*bf16", "y_ptr": "*bf16"}, {"size": 14336, "gated": True, "block": 1024}),
    (
        fused.write_kv_kernel,
        dict.fromkeys(("key_ptr", "value_ptr", "key_cache_ptr", "value_cache_ptr"), "*bf16") | {"slots_ptr": "*i64"},
        {"size": 1024, "block": 1024},
    ),
]


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("kernel", "types", "constants"), COMPILED, ids=["norm", "rotary", "activation", "write_kv"])
def test_memory_is_read_and_written_16_bytes_at_a_time(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int
) -> None:
    text = ptx(kernel, capability, types, constants | {"overlap": capability >= 90}, num_warps=4)
    assert "ld.global.v4.b32" in text
    assert "st.global.v4.b32" in text


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("dtype", "parts"), [("bf16", 1), ("fp16", 2), ("fp32", 3)])
def test_the_router_multiplies_on_tensor_cores(dtype: str, parts: int, capability: int) -> None:
    types = {"x_ptr": f"*{dtype}", "gate_ptr": "*fp32", "logits_ptr": "*fp32"}
    constants = {
        "num_experts": 128,
        "hidden": 2688,
        "cut_k": 192,
        "x_parts": parts,
        "gate_parts": 3,
        "block_t": 16,
        "block_e": 64,
        "block_k": 64,
        "native": True,
        "overlap": capability >= 90,
    }
    text = ptx(fused.gate_kernel, capability, types, constants, num_warps=4, num_stages=3)
    # Sixteen tokens and 64 experts over four warps are two instructions for each 16 of K = 64, of each kept product of parts.
    products = sum(i + j <= 2 for i in range(parts) for j in range(3))
    assert text.count("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32") == products * 8


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_the_choice_of_experts_compiles(routing: Routing, capability: int) -> None:
    types = dict.fromkeys(("logits_ptr", "bias_ptr", "weights_ptr"), "*fp32") | {"ids_ptr": "*i64", "scale": "fp32"}
    constants = {
        "cuts": 4,
        "num_experts": routing.num_experts,
        "top_k": routing.top_k,
        "sigmoid": routing.scoring == "sigmoid",
        "biased": True,
        "normalize": routing.normalize,
        "num_groups": routing.num_groups,
        "topk_groups": routing.topk_groups,
        "groups": 1 << (routing.num_groups - 1).bit_length(),
        "members": 1 << (routing.num_experts // routing.num_groups - 1).bit_length(),
        "slots": 1 << (routing.top_k - 1).bit_length(),
        "overlap": capability >= 90,
    }
    assert "st.global" in ptx(fused.choose_kernel, capability, types, constants, num_warps=1)


@needs_triton
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "tests.kernels.interpreted_fused"]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 64, 127, 576, 2688, 8192, 16384])
def test_norms(width: int, dtype: torch.dtype) -> None:
    check_norms(width, dtype, "cuda")


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_heads(dtype: torch.dtype) -> None:
    check_norms_of_heads(dtype, "cuda")


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "group_size"), [(8, 512), (1, 4096), (3, 48)])
def test_gated_norms(groups: int, group_size: int, dtype: torch.dtype) -> None:
    check_gated_norms(groups, group_size, dtype, "cuda")


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 128), (64, 64), (80, 48), (256, 64), (96, 96)])
def test_rotation_is_in_place_and_leaves_values_alone(head_dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    check_rotary(head_dim, rotary_dim, dtype, "cuda")


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 14336), (7, 1), (129, 1856), (70000, 8)])
def test_activations(rows: int, width: int, dtype: torch.dtype) -> None:
    check_activations(rows, width, dtype, "cuda")


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(8, 128), (1, 80), (3, 96), (32, 256)])
def test_keys_and_values_go_to_their_slots_alone(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    check_write_kv(num_kv_heads, head_dim, dtype, "cuda")


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 2688), (7, 300), (300, 4096)])
def test_routing(num_tokens: int, hidden: int, routing: Routing, dtype: torch.dtype, gate_dtype: torch.dtype) -> None:
    check_route(routing, num_tokens, hidden, dtype, gate_dtype, "cuda")


@pytest.mark.gpu
@gpu_test
def test_of_equal_experts_the_lower_id_wins() -> None:
    check_ties("cuda")


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize("num_tokens", [1, 64, 2000])
def test_the_same_input_gives_the_same_bits(num_tokens: int) -> None:
    x, gate = randn(num_tokens, 2688, dtype=torch.bfloat16, device="cuda"), randn(128, 2688, device="cuda")
    weight = randn(2688, device="cuda")
    calls: list[Callable[[], Tensor]] = [
        lambda: FUSED.route(x, gate, None, ROUTINGS[2])[1],
        lambda: FUSED.rms_norm(x, weight, EPS),
        lambda: FUSED.gated_rms_norm(x, x, weight, EPS, 336),
        lambda: FUSED.silu_and_mul(x),
    ]
    for call in calls:
        first = call()
        for _ in range(10):
            assert torch.equal(call(), first)
