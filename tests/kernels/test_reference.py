"""The reference against formulas written another way, since every fast kernel is compared with it."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, NemotronHConfig, OlmoeConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNormGated, NemotronHTopkRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from eightfold.kernels.operations import AttentionMetadata, AttentionSpec, Routing
from eightfold.kernels.reference import ReferenceAttention, ReferenceFused, ReferenceLinear
from eightfold.quant.mxfp8 import dequantize, quantize
from tests.oracle import assert_matches
from tests.tolerances import OF_DTYPE

FUSED = ReferenceFused()
NUM_EXPERTS = 16
Scoring: TypeAlias = Literal["softmax", "sigmoid"]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("k", [1, 33, 576])
def test_linear_is_the_product_with_the_dequantized_weight(k: int) -> None:
    weight, x, bias = quantize(randn(7, k)), randn(5, k, seed=1), randn(7, seed=2)
    linear = ReferenceLinear()
    expected = x.double() @ dequantize(weight).double().T + bias.double()
    assert torch.allclose(linear.run(x, linear.prepare(weight, bias)).double(), expected, rtol=1e-5, atol=1e-5)
    dense = randn(7, k).bfloat16()
    expected = x.double() @ dense.double().T
    assert torch.allclose(linear.run(x, linear.prepare(dense, None)).double(), expected, rtol=1e-5, atol=1e-5)


def test_rms_norm_by_hand() -> None:
    x = torch.tensor([[3.0, 4.0]])
    found = FUSED.rms_norm(x, torch.tensor([1.0, 2.0]), 0.0)
    assert torch.allclose(found, torch.tensor([[3.0 / math.sqrt(12.5), 8.0 / math.sqrt(12.5)]]))
    normed, total = FUSED.add_rms_norm(x, torch.tensor([[1.0, -1.0]]), torch.ones(2), 0.0)
    assert torch.equal(total, torch.tensor([[4.0, 3.0]]))
    assert torch.allclose(normed, total / math.sqrt(12.5))


def test_rotary_turns_each_pair_by_its_angle() -> None:
    angles = torch.tensor([[0.0, 0.0], [math.pi / 2, math.pi]])
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)  # two positions, rotary_dim 4
    query = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0]]])  # head_dim 5: the last element passes through
    at_zero, _ = FUSED.rotary(query, query, table, torch.tensor([0]))
    at_one, key = FUSED.rotary(query, query, table, torch.tensor([1]))
    assert torch.equal(at_zero, query)
    # (1, 3) turned by 90 degrees is (-3, 1); (2, 4) turned by 180 degrees is (-2, -4).
    assert torch.allclose(at_one, torch.tensor([[[-3.0, -2.0, 1.0, -4.0, 5.0]]]), atol=1e-6)
    assert torch.equal(at_one, key)


def test_silu_and_mul_takes_the_gate_first() -> None:
    found = FUSED.silu_and_mul(torch.tensor([[1.0, -2.0, 10.0, 100.0]]))
    sigmoid = [1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(2.0))]
    assert torch.allclose(found, torch.tensor([[10.0 * sigmoid[0], -200.0 * sigmoid[1]]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_relu2_squares_what_is_positive_and_rounds_once(dtype: torch.dtype) -> None:
    by_hand = FUSED.relu2(torch.tensor([[-3.0, -0.0, 0.0, 1.5, 16.0]], dtype=dtype))
    assert by_hand.tolist() == [[0.0, 0.0, 0.0, 2.25, 256.0]]
    x = randn(5, 33).to(dtype)
    assert torch.equal(FUSED.relu2(x), (x.double().clamp(min=0) ** 2).to(dtype))


def test_gated_rms_norm_by_hand() -> None:
    """silu(50) is 50 and silu(100) is 100 in fp32; the gate counts before the norm, and each group has a norm of its own."""
    x, weight = torch.tensor([[3.0, 4.0, 0.0, -2.0]]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    gate = torch.tensor([[100.0, 50.0, 50.0, 50.0]])
    # x * silu(gate) is 50 times (6, 4, 0, -2).
    in_pairs = [6 / math.sqrt(26), 8 / math.sqrt(26), 0.0, -8 / math.sqrt(2)]
    torch.testing.assert_close(FUSED.gated_rms_norm(x, gate, weight, 0.0, 2), torch.tensor([in_pairs]))
    whole = [6 / math.sqrt(14), 8 / math.sqrt(14), 0.0, -8 / math.sqrt(14)]
    torch.testing.assert_close(FUSED.gated_rms_norm(x, gate, weight, 0.0, 4), torch.tensor([whole]))
    signs = torch.tensor([[1.0, 2.0, 0.0, -4.0]])
    torch.testing.assert_close(FUSED.gated_rms_norm(x, gate, weight, 0.0, 1)[:, [0, 1, 3]], signs[:, [0, 1, 3]])
    # 2500 * 14 is the mean square of all four, and eps is added to that.
    halved = FUSED.gated_rms_norm(x, gate, weight, 3 * 2500 * 14.0, 4)
    torch.testing.assert_close(halved, torch.tensor([whole]) / 2)


@pytest.mark.parametrize("group_size", [1, 3, 8, 24])
def test_gated_rms_norm_is_that_of_transformers(group_size: int) -> None:
    norm = NemotronHRMSNormGated(24, group_size, eps=1e-3)  # type: ignore[no-untyped-call]
    norm.weight.data.copy_(randn(24, seed=3))
    apart = randn(5, 60)
    x, gate = apart[:, 2:26], apart[:, 31:55]
    found = FUSED.gated_rms_norm(x, gate, norm.weight.data, 1e-3, group_size)
    torch.testing.assert_close(found, norm(x, gate).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group_size", [3, 24])
def test_gated_rms_norm_is_in_fp32_and_rounds_once(group_size: int, dtype: torch.dtype) -> None:
    x, gate, weight = randn(33, 24).to(dtype), randn(33, 24, seed=1).to(dtype), randn(24, seed=2).to(dtype)
    groups = (x.double() * gate.double() / (1 + torch.exp(-gate.double()))).unflatten(1, (-1, group_size))
    expected = (groups / (groups.square().mean(dim=2, keepdim=True) + 1e-5).sqrt()).flatten(1) * weight.double()
    assert_matches(FUSED.gated_rms_norm(x, gate, weight, 1e-5, group_size), expected, OF_DTYPE[dtype])


def route_logits(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Route tokens whose logits `[T, E]` are these exactly."""
    return FUSED.route(logits, torch.eye(logits.shape[1]), bias, routing)


def best(values: list[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda index: (-values[index], index))[:count]


def route_by_hand(logits: list[float], bias: list[float], routing: Routing) -> tuple[list[int], list[float]]:
    """One token's experts and weights, by the formula of `Routing` in fp64, with the sum with the bias rounded to fp32."""
    total = sum(math.exp(logit) for logit in logits)
    softmax = routing.scoring == "softmax"
    scores = [math.exp(logit) / total if softmax else 1 / (1 + math.exp(-logit)) for logit in logits]
    choice = (torch.tensor(scores) + torch.tensor(bias)).tolist()
    size = len(logits) // routing.num_groups
    groups = [sorted(choice[start : start + size])[-2:] for start in range(0, len(logits), size)]
    kept = best([sum(group) for group in groups], routing.topk_groups)
    ids = best([value if index // size in kept else -math.inf for index, value in enumerate(choice)], routing.top_k)
    divisor = sum(scores[index] for index in ids) if routing.normalize else 1.0
    return ids, [scores[index] / divisor * routing.scale for index in ids]


GROUPS = [(1, 1), (2, 1), (4, 1), (4, 2), (4, 3), (4, 4)]


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
@pytest.mark.parametrize(("num_groups", "topk_groups"), GROUPS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_routing_by_hand(scoring: Scoring, normalize: bool, num_groups: int, topk_groups: int, shift: float) -> None:
    """A bias of ten thousand leaves steps of 2^-10 in fp32, so that experts tie and the lower ids win."""
    routing = Routing(NUM_EXPERTS, 3, scoring, normalize, 2.5, num_groups, topk_groups)
    logits, bias = randn(50, NUM_EXPERTS), 0.3 * randn(NUM_EXPERTS, seed=1) + shift
    ids, weights = route_logits(logits, bias, routing)
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
    for row, found, shares in zip(logits.tolist(), ids.tolist(), weights.tolist(), strict=True):
        expected, expected_shares = route_by_hand(row, bias.tolist(), routing)
        assert found == expected
        assert shares == pytest.approx(expected_shares, rel=1e-5)


def spread(ids: Tensor, weights: Tensor) -> Tensor:
    """`[T, E]`: each expert's weight, whatever the order in which they were chosen."""
    return torch.zeros(len(ids), NUM_EXPERTS).scatter_(1, ids, weights)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("num_groups", "topk_groups"), GROUPS)
@torch.no_grad()
def test_routing_by_sigmoid_is_that_of_transformers(num_groups: int, topk_groups: int, normalize: bool) -> None:
    config = NemotronHConfig(
        hidden_size=48,
        n_routed_experts=NUM_EXPERTS,
        num_experts_per_tok=3,
        routed_scaling_factor=2.5,
        n_group=num_groups,
        topk_group=topk_groups,
        norm_topk_prob=normalize,
    )
    router = NemotronHTopkRouter(config)
    router.weight.copy_(randn(NUM_EXPERTS, 48, seed=1) / 5)
    router.e_score_correction_bias.copy_(randn(NUM_EXPERTS, seed=2) / 3)
    routing = Routing(NUM_EXPERTS, 3, "sigmoid", normalize, 2.5, num_groups, topk_groups)
    x = randn(50, 48)
    ids, weights = FUSED.route(x, router.weight, router.e_score_correction_bias, routing)
    _, expected_weights, expected_ids = router(x)
    torch.testing.assert_close(spread(ids, weights), spread(expected_ids, expected_weights))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe normalizing", "qwen3_moe", "olmoe normalizing", "olmoe"])
@torch.no_grad()
def test_routing_by_softmax_is_that_of_transformers(family: str) -> None:
    normalize = family == "mixtral" or family.endswith("normalizing")
    router: torch.nn.Module
    if family == "mixtral":
        config = MixtralConfig(hidden_size=48, num_local_experts=NUM_EXPERTS, num_experts_per_tok=3)
        router = MixtralTopKRouter(config)  # type: ignore[no-untyped-call]
    elif family.startswith("qwen3_moe"):
        router = Qwen3MoeTopKRouter(  # type: ignore[no-untyped-call]
            Qwen3MoeConfig(hidden_size=48, num_experts=NUM_EXPERTS, num_experts_per_tok=3, norm_topk_prob=normalize)
        )
    else:
        router = OlmoeTopKRouter(  # type: ignore[no-untyped-call]
            OlmoeConfig(hidden_size=48, num_experts=NUM_EXPERTS, num_experts_per_tok=3, norm_topk_prob=normalize)
        )
    gate, x = randn(NUM_EXPERTS, 48, seed=1) / 5, randn(50, 48)
    router.load_state_dict({"weight": gate})
    ids, weights = FUSED.route(x, gate, None, Routing(NUM_EXPERTS, 3, "softmax", normalize))
    _, expected_weights, expected_ids = router(x)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_correction_bias_chooses_and_never_weighs(scoring: Scoring) -> None:
    """Experts stand in the order of score and bias, and have their scores as weights."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    scores = (logits.softmax(1) if scoring == "softmax" else logits.sigmoid())[0]
    routing = Routing(4, 2, scoring, normalize=False)
    for bias, expected in (
        (None, [0, 1]),
        ([0.0, 0.0, 0.0, 0.0], [0, 1]),
        ([7.0, 7.0, 7.0, 7.0], [0, 1]),
        ([0.0, 0.0, 1e4, 2e4], [3, 2]),
        ([-1e4, 0.0, 0.0, 0.0], [1, 2]),
        ([-1e4, -1e4, -2e4, -3e4], [0, 1]),
    ):
        ids, weights = route_logits(logits, None if bias is None else torch.tensor(bias), routing)
        assert ids.tolist() == [expected]
        torch.testing.assert_close(weights[0], scores[expected], rtol=1e-6, atol=0.0)


def test_of_equal_experts_and_of_equal_groups_the_lower_id_wins() -> None:
    plain = Routing(NUM_EXPERTS, 5, "sigmoid", normalize=True)
    logits = torch.zeros(2, NUM_EXPERTS)
    logits[0, [4, 9, 11]] = 1.0
    ids, weights = route_logits(logits, None, plain)
    assert ids.tolist() == [[4, 9, 11, 0, 1], [0, 1, 2, 3, 4]]
    assert torch.equal(weights[1], torch.full((5,), 0.2))
    # Groups 1 and 3 stand higher than 0 and 2; then all four alike.
    logits[0] = torch.tensor([0, 0, 0, 0, 2, 0, 0, 1, 0, 0, 0, 0, 0, 1, 2, 0])
    grouped = Routing(NUM_EXPERTS, 5, "sigmoid", normalize=True, num_groups=4, topk_groups=2)
    assert route_logits(logits, None, grouped)[0].tolist() == [[4, 14, 7, 13, 5], [0, 1, 2, 3, 4]]
    # The third group is 0 or 2, which stand alike.
    third = Routing(NUM_EXPERTS, 9, "sigmoid", normalize=True, num_groups=4, topk_groups=3)
    assert route_logits(logits, None, third)[0][0].tolist() == [4, 14, 7, 13, 0, 1, 2, 3, 5]


def test_a_group_stands_by_its_two_best_and_one_left_out_is_never_chosen() -> None:
    """Group 0 has the best expert and group 1 the best two; all choices are negative, so that a zero would win over them."""
    logits = torch.tensor([[5.0, -5.0, -5.0, -5.0, 1.0, 1.5, -5.0, -5.0]])
    routing = Routing(8, 3, "sigmoid", normalize=False, num_groups=2, topk_groups=1)
    for bias in (torch.zeros(8), torch.full((8,), -3.0)):
        assert route_logits(logits, bias, routing)[0].tolist() == [[5, 4, 6]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_all_groups_kept_is_no_groups(scoring: Scoring) -> None:
    logits, bias = randn(50, NUM_EXPERTS), randn(NUM_EXPERTS, seed=1)
    grouped, plain = (
        route_logits(logits, bias, Routing(NUM_EXPERTS, 3, scoring, True, 1.0, groups, groups)) for groups in (4, 1)
    )
    assert torch.equal(grouped[0], plain[0])
    assert torch.equal(grouped[1], plain[1])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_routing_is_in_fp32_whatever_the_activations_are(scoring: Scoring) -> None:
    """In bf16 the sums of 48 products, and scores and biases that differ in their tenth bit, would give other choices."""
    routing = Routing(NUM_EXPERTS, 3, scoring, normalize=True, num_groups=4, topk_groups=2)
    x, gate = randn(50, 48).bfloat16(), (randn(NUM_EXPERTS, 48, seed=1) / 5).bfloat16()
    bias = 1 + 1e-3 * randn(NUM_EXPERTS, seed=2)
    ids, weights = FUSED.route(x, gate, bias, routing)
    expected_ids, expected_weights = FUSED.route(x.float(), gate.float(), bias, routing)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(weights, expected_weights)
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
    equal = torch.zeros(1, NUM_EXPERTS).bfloat16()
    close = 0.5 + 1e-6 * torch.arange(NUM_EXPERTS)
    plain = Routing(NUM_EXPERTS, 3, scoring, normalize=True)
    assert FUSED.route(equal, torch.eye(NUM_EXPERTS).bfloat16(), close, plain)[0].tolist() == [[15, 14, 13]]


def test_extreme_logits_give_finite_weights() -> None:
    """softmax subtracts the largest; scores of zero under sigmoid are divided by 1e-20 and not by zero."""
    logits = torch.tensor([[3e4, 3e4, -3e4, 0.0], [-300.0, -300.0, -300.0, -300.0]])
    _, weights = route_logits(logits, None, Routing(4, 2, "softmax", normalize=True))
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    _, weights = route_logits(logits, None, Routing(4, 2, "sigmoid", normalize=True, scale=3.0))
    assert weights.tolist() == [[1.5, 1.5], [0.0, 0.0]]


def test_no_tokens_are_routed_nowhere() -> None:
    for num_groups in (1, 4):
        routing = Routing(NUM_EXPERTS, 3, "sigmoid", normalize=True, num_groups=num_groups)
        ids, weights = route_logits(torch.empty(0, NUM_EXPERTS), torch.zeros(NUM_EXPERTS), routing)
        assert (ids.shape, ids.dtype, weights.shape, weights.dtype) == ((0, 3), torch.int64, (0, 3), torch.float32)


def test_write_kv_puts_each_token_into_its_slot() -> None:
    cache = torch.zeros(3, 4, 1, 2), torch.zeros(3, 4, 1, 2)
    FUSED.write_kv(randn(2, 1, 2), randn(2, 1, 2, seed=1), *cache, torch.tensor([9, 2]))
    assert torch.equal(cache[0][2, 1], randn(2, 1, 2)[0])
    assert torch.equal(cache[1][0, 2], randn(2, 1, 2, seed=1)[1])
    assert int((cache[0] != 0).sum()) == 4


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_attention_is_softmax_over_what_each_token_may_see(window: int | None, num_kv_heads: int) -> None:
    """Two sequences in scattered blocks: a chunk of 3 that ends a context of 7, and a decode at a context of 5."""
    spec = AttentionSpec(4, num_kv_heads, 6, 0.37, window, torch.float32)
    key_cache, value_cache = (torch.full((6, 4, num_kv_heads, 6), float("nan")) for _ in range(2))
    tables = torch.tensor([[4, 1], [0, 3]], dtype=torch.int32)
    contexts, chunks = [7, 5], [3, 1]
    keys = [randn(n, num_kv_heads, 6, seed=n) for n in contexts]
    values = [randn(n, num_kv_heads, 6, seed=n + 50) for n in contexts]
    for sequence in range(2):
        for position in range(contexts[sequence]):
            block, offset = int(tables[sequence, position // 4]), position % 4
            key_cache[block, offset] = keys[sequence][position]
            value_cache[block, offset] = values[sequence][position]
    query = randn(4, 4, 6, seed=9)
    metadata = AttentionMetadata(
        slot_mapping=torch.empty(0, dtype=torch.int64),
        block_tables=tables,
        query_start=torch.tensor([0, 3, 4], dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        max_query_len=3,
        max_context_len=7,
    )
    found = ReferenceAttention().run(query, key_cache, value_cache, metadata, spec).view(4, 4, 6)
    row = 0
    for sequence in range(2):
        for offset in range(chunks[sequence]):
            position = contexts[sequence] - chunks[sequence] + offset
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(4):
                kv_head = head // (4 // num_kv_heads)
                seen_keys = keys[sequence][first : position + 1, kv_head].double()
                weights = (seen_keys @ query[row, head].double() * 0.37).softmax(0)
                expected = weights @ values[sequence][first : position + 1, kv_head].double()
                assert torch.allclose(found[row, head].double(), expected, atol=1e-6)
            row += 1
