"""Recurrences and experts of the reference against transformers and against loops in fp64.

Fast kernels are compared with these, so each comparison is also shown to notice planted faults.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, NemotronHConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import (
    NemotronHExperts,
    causal_conv1d_fn,
    causal_conv1d_update,
    mamba2_chunk_scan,
    mamba2_selective_state_update,
)

from eightfold.kernels.operations import MambaSpec, MoeSpec
from eightfold.kernels.reference_mixers import ReferenceMamba, ReferenceMoe
from tests.kernels.mamba_oracle import (
    HEADS,
    NUM_SLOTS,
    UNLIMITED,
    Mixer,
    Scan,
    convolve,
    filters,
    metadata,
    randn,
    recurrence,
    same_bits,
    scan_of,
    spec_of,
    step_size,
)
from tests.kernels.moe_oracle import FAULTS, NUM_EXPERTS, Call, Experts, by_formula, call_of, dense, experts_of
from tests.oracle import assert_matches, mismatch
from tests.tolerances import BF16, FP32, OF_DTYPE

MAMBA, MOE = ReferenceMamba(), ReferenceMoe()
DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = (1, 2, 7, 33)


# The recurrence.


def assert_scan(scan: Scan, spec: MambaSpec, *, carried: bool) -> None:
    shape = (HEADS, spec.head_dim, spec.state_size)
    states = torch.full((3, *shape), torch.nan).to(spec.state_dtype)
    if carried:
        states[1] = randn(*shape, seed=9).to(spec.state_dtype)
    start = states[1].clone() if carried else torch.zeros(shape)
    found = scan.run(MAMBA, states, metadata([len(scan.x)], [1], is_new=not carried), spec)
    expected = recurrence(scan, spec, start)
    assert_matches(found, expected.y, OF_DTYPE[spec.activation_dtype], expected.y_magnitude)
    assert_matches(states[1], expected.state, OF_DTYPE[spec.state_dtype], expected.state_magnitude)


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_groups", "head_dim", "state_size"), [(1, 3, 5), (2, 1, 7), (4, 7, 1), (2, 5, 33)])
def test_the_scan_is_the_recurrence(
    num_groups: int, head_dim: int, state_size: int, dtype: torch.dtype, length: int, carried: bool
) -> None:
    spec = spec_of(num_groups, head_dim=head_dim, state_size=state_size, dtype=dtype)
    assert_scan(scan_of(length, spec), spec, carried=carried)


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_states_in_bf16_are_rounded_once_a_call(dtype: torch.dtype, carried: bool) -> None:
    """Between the tokens of a call the state is in fp32, and 33 roundings would be beyond the tolerance of one."""
    spec = spec_of(dtype=dtype, state_dtype=torch.bfloat16)
    assert_scan(scan_of(33, spec), spec, carried=carried)


def test_states_in_bf16_are_rounded_where_a_sequence_is_cut() -> None:
    spec = spec_of(state_dtype=torch.bfloat16)
    scan, shape = scan_of(33, spec), (HEADS, spec.head_dim, spec.state_size)
    states, state = torch.full((1, *shape), torch.nan).bfloat16(), torch.zeros(shape)
    for start, stop in pairwise((0, 1, 13, 33)):
        cut = scan.tokens(slice(start, stop))
        found = cut.run(MAMBA, states, metadata([stop - start], [0], is_new=start == 0), spec)
        expected = recurrence(cut, spec, state)
        assert_matches(found, expected.y, FP32, expected.y_magnitude)
        assert_matches(states[0], expected.state, BF16, expected.state_magnitude)
        state = states[0].float()


@pytest.mark.parametrize("limits", [UNLIMITED, (0.05, 1.5), (0.7, 0.7), (0.0, 0.1), (3.0, math.inf)])
def test_step_sizes_over_the_whole_of_softplus_and_its_limits(limits: tuple[float, float]) -> None:
    """An update of one shows the step, and what is left of a state of one shows the decay."""
    spec, ones = spec_of(1, head_dim=1, state_size=1, limits=limits), torch.ones(1, HEADS, 1)
    for value in (-200.0, -104.0, -30.0, -17.0, -1.0, 0.0, 0.5, 10.0, 19.9, 20.0, 20.1, 25.0, 80.0, 200.0):
        expected = step_size(value, limits)
        by_token, by_head = torch.full((1, HEADS), value / 2), torch.full((HEADS,), value / 2)
        scan = Scan(ones, by_token, -torch.ones(HEADS), ones[:, :1], ones[:, :1], torch.zeros(HEADS), by_head)
        found = scan.run(MAMBA, torch.zeros(1, HEADS, 1, 1), metadata([1], [0]), spec)
        torch.testing.assert_close(found, torch.full_like(found, expected), rtol=3e-6, atol=1e-45)
        scan = replace(scan, x=torch.zeros(1, HEADS, 1))
        found = scan.run(MAMBA, torch.ones(1, HEADS, 1, 1), metadata([1], [0], is_new=False), spec)
        # The exponent is rounded to fp32, and so the decay loses in proportion to it.
        bound = 1e-6 + 2e-7 * expected
        torch.testing.assert_close(found, torch.full_like(found, math.exp(-expected)), rtol=bound, atol=1e-45)


@pytest.mark.parametrize("limits", [(0.05, 1.5), (0.7, 0.7)])
def test_the_scan_with_limits_and_large_steps_is_the_recurrence(limits: tuple[float, float]) -> None:
    spec = spec_of(limits=limits)
    scan = scan_of(33, spec)
    assert_scan(replace(scan, dt=20 * scan.dt), spec, carried=True)


@pytest.mark.parametrize("limits", [UNLIMITED, (0.05, 1.5)])
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_the_scan_is_the_chunked_one_of_transformers(
    num_groups: int, length: int, carried: bool, limits: tuple[float, float]
) -> None:
    spec = spec_of(num_groups, limits=limits)
    scan, start = scan_of(length, spec), randn(1, HEADS, spec.head_dim, spec.state_size, seed=9)
    states = start.clone() if carried else torch.full_like(start, torch.nan)
    found = scan.run(MAMBA, states, metadata([length], [0], is_new=not carried), spec)
    expected, state = mamba2_chunk_scan(
        scan.x[None],
        scan.dt[None],
        scan.a,
        scan.b[None],
        scan.c[None],
        chunk_size=8,
        D=scan.d,
        dt_bias=scan.dt_bias,
        initial_states=start if carried else None,
        dt_softplus=True,
        dt_limit=limits,
        return_final_states=True,
    )
    # Its decays are exponentials of differences of sums, each rounded to fp32.
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=2e-6 * float(expected.abs().max()))
    torch.testing.assert_close(states, state, rtol=1e-4, atol=2e-6 * float(state.abs().max()))


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_the_scan_is_the_stepwise_one_of_transformers(num_groups: int) -> None:
    """Three sequences take a token each from their slots, as in decoding."""
    spec = spec_of(num_groups)
    scan, states = scan_of(3, spec), randn(NUM_SLOTS, HEADS, spec.head_dim, spec.state_size, seed=9)
    slots, wide = [7, 2, 5], (3, HEADS, spec.head_dim)
    state = states[slots].clone()
    found = scan.run(MAMBA, states, metadata([1, 1, 1], slots, is_new=False), spec)
    expected = mamba2_selective_state_update(
        state,
        scan.x,
        scan.dt[:, :, None].expand(wide),
        scan.a[:, None, None].expand(*wide[1:], spec.state_size),
        scan.b,
        scan.c,
        scan.d[:, None].expand(wide[1:]),
        dt_bias=scan.dt_bias[:, None].expand(wide[1:]),
        dt_softplus=True,
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
    torch.testing.assert_close(states[slots], state, rtol=1e-5, atol=1e-6 * float(state.abs().max()))


SCAN_FAULTS: dict[str, Callable[[Scan], Scan]] = {
    "b and c exchanged": lambda scan: replace(scan, b=scan.c, c=scan.b),
    "groups in the other order": lambda scan: replace(scan, b=scan.b.flip(1), c=scan.c.flip(1)),
    "no skip": lambda scan: replace(scan, d=torch.zeros_like(scan.d)),
    "no bias of the steps": lambda scan: replace(scan, dt_bias=torch.zeros_like(scan.dt_bias)),
    "decays of another head": lambda scan: replace(scan, a=scan.a.roll(1)),
    "steps of the token before": lambda scan: replace(scan, dt=scan.dt.roll(1, 0)),
    "the first token lost": lambda scan: replace(scan, x=scan.x.clone().index_fill_(0, torch.tensor([0]), 0.0)),
    "all times 1.02": lambda scan: replace(scan, x=1.02 * scan.x),
}


@pytest.mark.parametrize("fault", SCAN_FAULTS)
def test_the_oracle_of_the_scan_notices_planted_faults(fault: str) -> None:
    spec = spec_of()
    scan = scan_of(7, spec)
    states = torch.zeros(1, HEADS, spec.head_dim, spec.state_size)
    expected = recurrence(scan, spec, states[0])

    def reason(operands: Scan) -> str | None:
        found = operands.run(MAMBA, states, metadata([7], [0]), spec)
        return mismatch(found, expected.y, FP32, expected.y_magnitude)

    assert reason(scan) is None
    assert reason(SCAN_FAULTS[fault](scan)) is not None


# The convolution.


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_the_convolution_is_its_formula(kernel: int, dtype: torch.dtype, has_bias: bool, carried: bool) -> None:
    spec = spec_of(kernel=kernel, dtype=dtype)
    weight, bias = filters(5, kernel, dtype, has_bias=has_bias)
    for length in LENGTHS:
        x, states = randn(length, 5, seed=length).to(dtype), torch.full((2, 5, kernel - 1), torch.nan).to(dtype)
        if carried:
            states[1] = randn(5, kernel - 1, seed=3).to(dtype)
        before = states[1].clone() if carried else torch.zeros_like(states[1])
        found = MAMBA.conv(x, weight, bias, states, metadata([length], [1], is_new=not carried), spec)
        expected, magnitude = convolve(x, weight, bias, before)
        assert_matches(found, expected, OF_DTYPE[dtype], magnitude)
        assert same_bits(states[1], torch.cat((before.T, x))[-(kernel - 1) :].T)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_the_convolution_is_that_of_transformers(kernel: int, has_bias: bool) -> None:
    """A sequence from its start, then going on by several tokens and by one."""
    spec, states = spec_of(kernel=kernel), torch.full((1, 5, kernel - 1), torch.nan)
    weight, bias = filters(5, kernel, torch.float32, has_bias=has_bias)
    x = randn(41, 5)
    found = MAMBA.conv(x[:33], weight, bias, states, metadata([33], [0]), spec)
    expected = causal_conv1d_fn(x[:33].T[None], weight, bias, activation="silu")
    torch.testing.assert_close(found, expected[0].T)
    theirs = states.clone()
    for start, stop in ((33, 40), (40, 41)):
        found = MAMBA.conv(x[start:stop], weight, bias, states, metadata([stop - start], [0], is_new=False), spec)
        expected = causal_conv1d_update(x[start:stop].T[None], theirs, weight, bias, activation="silu")
        torch.testing.assert_close(found, expected[0].T)
        assert torch.equal(states, theirs)


def test_a_sequence_shorter_than_the_filter_keeps_older_inputs() -> None:
    """Oldest first: after 3, an input of 4 leaves 3 and 4; and a new sequence has zeros before it."""
    spec, weight = spec_of(kernel=3), torch.tensor([[100.0, 10.0, 1.0]])
    states = torch.tensor([[[2.0, 3.0]], [[torch.nan, torch.nan]]])
    x = torch.tensor([[4.0], [5.0]])
    found = MAMBA.conv(x, weight, None, states, metadata([1, 1], [0, 1], is_new=[False, True]), spec)
    torch.testing.assert_close(found, torch.nn.functional.silu(torch.tensor([[234.0], [5.0]])))
    assert states.tolist() == [[[3.0, 4.0]], [[0.0, 5.0]]]


CONV_FAULTS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "taps in the other order": lambda x, weight: (x, weight.flip(1)),
    "two channels exchanged": lambda x, weight: (x, weight[[1, 0, 2, 3, 4]]),
    "a token late": lambda x, weight: (x.roll(1, 0), weight),
    "all times 1.02": lambda x, weight: (x, 1.02 * weight),
}


@pytest.mark.parametrize("fault", CONV_FAULTS)
def test_the_oracle_of_the_convolution_notices_planted_faults(fault: str) -> None:
    (weight, bias), x = filters(5, 4, torch.float32, has_bias=True), randn(7, 5)
    expected, magnitude = convolve(x, weight, bias, torch.zeros(5, 3))

    def reason(x: Tensor, weight: Tensor) -> str | None:
        found = MAMBA.conv(x, weight, bias, torch.zeros(1, 5, 3), metadata([7], [0]), spec_of())
        return mismatch(found, expected, FP32, magnitude)

    assert reason(x, weight) is None
    assert reason(*CONV_FAULTS[fault](x, weight)) is not None


# Both, over the slots of a batch.

MIXERS = [
    Mixer(MAMBA, spec_of(1, kernel=2)),
    Mixer(MAMBA, spec_of(4, state_size=7)),
    Mixer(MAMBA, spec_of(2, dtype=torch.bfloat16, limits=(0.05, 1.5))),
    Mixer(MAMBA, spec_of(2, kernel=3, dtype=torch.bfloat16, state_dtype=torch.bfloat16)),
]
every_mixer = pytest.mark.parametrize("mixer", MIXERS, ids=["one group", "four groups", "bf16", "bf16 states"])


def assert_near(found: Tensor, expected: Tensor, mixer: Mixer) -> None:
    """Equal but for exponentials, which torch rounds by where in a vector they stand, and for what bf16 makes of that."""
    bound = 1e-5 if mixer.spec.activation_dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound * float(expected.abs().max()))


def assert_states(states: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], mixer: Mixer) -> None:
    """Those of the convolution are copies of inputs and so the same bits."""
    assert same_bits(states[0], expected[0])
    assert_near(states[1], expected[1], mixer)


@every_mixer
def test_operands_may_be_views_whose_tokens_lie_apart(mixer: Mixer) -> None:
    tokens, states, dense_states = mixer.tokens(7), mixer.states(), mixer.states()
    views: list[Tensor] = []

    def keep(operand: Tensor) -> Tensor:
        views.append(operand)
        return operand

    where = metadata([2, 5], [3, 1])
    found = mixer.run(tokens, states, where, keep)
    assert len(views) == 5
    assert not any(operand.is_contiguous() for operand in views)
    assert same_bits(found, mixer.run(tokens, dense_states, where, torch.Tensor.contiguous))
    assert all(same_bits(*pair) for pair in zip(states, dense_states, strict=True))


@every_mixer
def test_each_sequence_of_a_batch_is_as_alone_and_other_slots_keep_their_bits(mixer: Mixer) -> None:
    lengths, slots, states, before = [7, 1, 33, 2], [6, 0, 3, 8], mixer.states(), mixer.states()
    tokens = mixer.tokens(sum(lengths))
    found = mixer.run(tokens, states, metadata(lengths, slots))
    for sequence, out, slot in zip(tokens.split(lengths), found.split(lengths), slots, strict=True):
        expected, expected_states = mixer.alone(sequence)
        assert_near(out, expected, mixer)
        assert_states((states[0][slot], states[1][slot]), expected_states, mixer)
    others = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    assert all(same_bits(state[others], untouched[others]) for state, untouched in zip(states, before, strict=True))


@pytest.mark.parametrize("size", [1, 5, 8, 13])
@every_mixer
def test_a_sequence_in_chunks_is_that_in_one(mixer: Mixer, size: int) -> None:
    """With another sequence ahead of each chunk."""
    tokens, other, states = mixer.tokens(33), mixer.tokens(33, seed=1), mixer.states()
    expected, expected_states = mixer.alone(tokens)
    found = []
    for start in range(0, 33, size):
        chunk, ahead = tokens[start : start + size], start % 3 + 1
        where = metadata([ahead, len(chunk)], [2, 5], is_new=[True, start == 0])
        found.append(mixer.run(torch.cat((other[:ahead], chunk)), states, where)[ahead:])
    assert_near(torch.cat(found), expected, mixer)
    assert_states((states[0][5], states[1][5]), expected_states, mixer)


@every_mixer
def test_a_save_is_the_state_of_a_run_that_stops_there(mixer: Mixer) -> None:
    """Several within a sequence, one at its very end, one at length 1; the sequence between them saves nothing."""
    lengths, slots, states, before = [13, 2, 7, 1], [0, 8, 4, 6], mixer.states(), mixer.states()
    tokens = mixer.tokens(sum(lengths))
    saves = ((0, 1, 3), (0, 5, 1), (0, 13, 7), (2, 6, 2), (3, 1, 5))
    found = mixer.run(tokens, states, metadata(lengths, slots, saves=saves))
    sequences = tokens.split(lengths)
    for sequence, taken, slot in (*saves, *((index, lengths[index], slots[index]) for index in range(4))):
        _, expected = mixer.alone(sequences[sequence][:taken])
        assert_states((states[0][slot], states[1][slot]), expected, mixer)
    assert all(same_bits(state[[7, 5]], state[[0, 6]]) for state in states)
    without, saved = mixer.states(), [3, 1, 7, 2, 5]
    assert same_bits(mixer.run(tokens, without, metadata(lengths, slots)), found)
    for state, unsaved, untouched in zip(states, without, before, strict=True):
        assert same_bits(state[slots], unsaved[slots])
        assert same_bits(unsaved[saved], untouched[saved])


@every_mixer
def test_a_sequence_goes_on_from_a_save_as_it_did(mixer: Mixer) -> None:
    """A save counts the tokens of its own call, and not those that the carried state has taken in."""
    tokens, states = mixer.tokens(20), mixer.states()
    mixer.run(tokens[:5], states, metadata([5], [1]))
    whole = mixer.run(tokens[5:], states, metadata([15], [1], is_new=False, saves=((0, 2, 7),)))
    rest = mixer.run(tokens[7:], states, metadata([13], [7], is_new=False))
    assert_near(rest, whole[2:], mixer)
    assert_states((states[0][7], states[1][7]), (states[0][1], states[1][1]), mixer)


# Experts.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_format", ["mxfp8", "bfloat16", "float32"])
@pytest.mark.parametrize(("width", "k"), [(56, 40), (58, 33), (48, 64), (1, 1)])
@pytest.mark.parametrize("gated", [False, True])
def test_experts_are_their_formula(gated: bool, width: int, k: int, weight_format: str, dtype: torch.dtype) -> None:
    experts = experts_of(gated=gated, width=width, k=k, weight_format=weight_format, dtype=dtype)
    for num_tokens in (1, 7, 33):
        call = call_of(experts, num_tokens)
        expected, magnitude = by_formula(call)
        assert_matches(call.run(MOE), expected, OF_DTYPE[dtype], magnitude)


def of_transformers(experts: Experts) -> torch.nn.Module:
    k, width = experts.spec.in_features, experts.spec.intermediate_size
    module: torch.nn.Module
    if experts.spec.gated:
        module = MixtralExperts(MixtralConfig(hidden_size=k, intermediate_size=width, num_local_experts=NUM_EXPERTS))
    else:
        config = NemotronHConfig(hidden_size=k, moe_intermediate_size=width, n_routed_experts=NUM_EXPERTS)
        module = NemotronHExperts(config)  # type: ignore[no-untyped-call]
    into = "gate_up_proj" if experts.spec.gated else "up_proj"
    module.load_state_dict({into: dense(experts.w13), "down_proj": dense(experts.w2)})
    return module


@pytest.mark.parametrize("weight_format", ["mxfp8", "bfloat16", "float32"])
@pytest.mark.parametrize(("width", "k"), [(56, 40), (58, 33)])
@pytest.mark.parametrize("gated", [False, True])
@torch.no_grad()
def test_experts_are_those_of_transformers(gated: bool, width: int, k: int, weight_format: str) -> None:
    call = call_of(experts_of(gated=gated, width=width, k=k, weight_format=weight_format), 33)
    expected = of_transformers(call.experts)(call.x, call.ids, call.weights)
    torch.testing.assert_close(call.run(MOE), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("gated", [False, True])
def test_experts_that_nobody_chose_have_no_part(gated: bool) -> None:
    call = replace(call_of(experts_of(gated=gated, weight_format="float32"), 7), ids=torch.tensor([[1, 4, 2]]).repeat(7, 1))
    expected = call.run(MOE)
    for weight in (call.experts.w13, call.experts.w2):
        assert isinstance(weight, Tensor)
        weight[[0, 3, 5]] = torch.nan
    assert same_bits(call.run(MOE), expected)
    assert replace(call, ids=call.ids + 1).run(MOE).isnan().all()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("weight_format", ["mxfp8", "float32"])
def test_no_tokens_give_no_rows(weight_format: str, gated: bool) -> None:
    found = call_of(experts_of(gated=gated, weight_format=weight_format, dtype=torch.bfloat16), 0).run(MOE)
    assert (found.shape, found.dtype) == ((0, 40), torch.bfloat16)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_tokens", [2, 7, 33, 130])
def test_tokens_in_another_order_give_the_same_rows(num_tokens: int, gated: bool) -> None:
    """Bit for bit: products of small integers, and outputs that take one inner element each, are exact in any order."""
    experts = experts_of(gated=gated, width=40, weight_format="float32")
    rearranged = torch.stack([torch.eye(40)[randn(40, seed=expert).argsort()] for expert in range(NUM_EXPERTS)])
    call = call_of(replace(experts, w13=dense(experts.w13).mul(2).round(), w2=rearranged), num_tokens)
    call = replace(call, x=call.x.mul(2).round())
    order = randn(num_tokens, seed=5).argsort()
    moved = replace(call, x=call.x[order], ids=call.ids[order], weights=call.weights[order])
    assert same_bits(moved.run(MOE), call.run(MOE)[order])


def test_the_sum_is_in_fp32_and_in_the_order_of_the_choice() -> None:
    """2^24 and one is 2^24 in fp32, so that the order shows; in bf16 a sum of 257 would lose its one."""
    spec = MoeSpec("m", 3, 3, 1, 1, gated=False, activation="relu2", weight_format="float32", activation_dtype=torch.float32)
    x, weights = torch.ones(1, 1), torch.ones(1, 3)

    def total(w2: list[float], x: Tensor, ids: list[int]) -> float:
        experts = Experts(torch.ones(3, 1, 1), torch.tensor(w2).reshape(3, 1, 1), spec)
        return float(Call(experts, x, torch.tensor([ids]), weights).run(MOE))

    large = [2.0**24, 1.0, -(2.0**24)]
    assert [total(large, x, ids) for ids in ([0, 1, 2], [1, 0, 2], [0, 2, 1], [2, 0, 1])] == [0.0, 0.0, 1.0, 1.0]
    assert total([256.0, 1.0, -256.0], x.bfloat16(), [0, 1, 2]) == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_format", ["mxfp8", "float32"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_oracle_of_experts_notices_planted_faults(fault: str, weight_format: str, dtype: torch.dtype) -> None:
    call = call_of(experts_of(gated=True, weight_format=weight_format, dtype=dtype), 7)
    expected, magnitude = by_formula(call)
    assert mismatch(call.run(MOE), expected, OF_DTYPE[dtype], magnitude) is None
    assert mismatch(FAULTS[fault](call).run(MOE), expected, OF_DTYPE[dtype], magnitude) is not None
