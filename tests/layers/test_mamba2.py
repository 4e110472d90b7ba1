"""Mamba2 against its formula, over slots that hold NaN until they are written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eightfold.kernels.operations import StateMetadata
from eightfold.layers.caches import StateCache
from eightfold.layers.mamba2 import Mamba2
from tests.layers.helpers import fill, kernels

HIDDEN, HEADS, HEAD_DIM, STATE, GROUPS, LENGTH = 20, 6, 5, 7, 2, 11
LIMITS = (0.05, 1.5)


def layer(*, proj_bias: bool = False, conv_bias: bool = True, kernel: int = 4) -> Mamba2:
    return Mamba2(
        "m",
        HIDDEN,
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        state_size=STATE,
        num_groups=GROUPS,
        conv_kernel=kernel,
        dt_limits=LIMITS,
        norm_eps=1e-5,
        proj_bias=proj_bias,
        conv_bias=conv_bias,
    )


def caches(mamba: Mamba2, num_slots: int = 4) -> StateCache:
    return StateCache(
        torch.empty(num_slots, mamba.conv_size, mamba.conv_kernel - 1), torch.empty(num_slots, HEADS, HEAD_DIM, STATE)
    )


def metadata(slot: int, length: int, *, is_new: bool, saves: tuple[tuple[int, int], ...] = ()) -> StateMetadata:
    return StateMetadata(
        slots=torch.tensor([slot]),
        is_new=torch.tensor([is_new]),
        query_start=torch.tensor([0, length], dtype=torch.int32),
        save_sequences=torch.zeros(len(saves), dtype=torch.int64),
        save_lengths=torch.tensor([after for after, _ in saves], dtype=torch.int64),
        save_slots=torch.tensor([target for _, target in saves], dtype=torch.int64),
        max_query_len=length,
    )


def by_formula(mamba: Mamba2, values: dict[str, Tensor], hidden_states: Tensor) -> Tensor:
    """The whole sequence at once, in fp64."""
    values = {name.removeprefix("m."): value.double() for name, value in values.items()}

    def bias(layer: str) -> Tensor:
        return values.get(f"{layer}.bias", torch.zeros(1, dtype=torch.float64))

    projected = hidden_states.double() @ values["in_proj.weight"].T + bias("in_proj")
    gate, xbc, dt = projected.split((mamba.inner_size, mamba.conv_size, HEADS), dim=1)
    padded = torch.nn.functional.pad(xbc.T, (mamba.conv_kernel - 1, 0))
    convolved = torch.nn.functional.conv1d(padded, values["conv1d.weight"], groups=mamba.conv_size).T + bias("conv1d")
    x, b, c = torch.nn.functional.silu(convolved).split((mamba.inner_size, GROUPS * STATE, GROUPS * STATE), dim=1)
    step = torch.nn.functional.softplus(dt + values["dt_bias"]).clamp(*LIMITS)
    state = torch.zeros(HEADS, HEAD_DIM, STATE, dtype=torch.float64)
    outputs = []
    for token in range(len(hidden_states)):
        groups = torch.arange(HEADS) // (HEADS // GROUPS)
        inputs = x[token].view(HEADS, HEAD_DIM)
        decay = torch.exp(-values["A_log"].exp() * step[token])
        state = state * decay[:, None, None] + torch.einsum(
            "h,hp,hn->hpn", step[token], inputs, b[token].view(GROUPS, STATE)[groups]
        )
        read = torch.einsum("hpn,hn->hp", state, c[token].view(GROUPS, STATE)[groups])
        outputs.append((read + values["D"][:, None] * inputs).flatten())
    gated = (torch.stack(outputs) * torch.nn.functional.silu(gate)).view(len(hidden_states), GROUPS, -1)
    normed = (gated * torch.rsqrt(gated.square().mean(dim=-1, keepdim=True) + 1e-5)).flatten(1) * values["norm.weight"]
    return (normed @ values["out_proj.weight"].T + bias("out_proj")).float()


@pytest.mark.parametrize("chunks", [[11], [3, 8], [1] * 11, [5, 1, 5]], ids=str)
@pytest.mark.parametrize("options", [{}, {"proj_bias": True}, {"conv_bias": False}, {"kernel": 2}], ids=str)
def test_any_chunks_equal_the_formula(options: dict[str, bool], chunks: list[int]) -> None:
    mamba = layer(**options)
    values = fill(mamba)
    mamba.bind(kernels())
    x, cache = 0.3 * torch.randn(LENGTH, HIDDEN), caches(mamba)
    found, start = [], 0
    for length in chunks:
        found.append(mamba(x[start : start + length], cache, metadata(2, length, is_new=start == 0)))
        start += length
    torch.testing.assert_close(torch.cat(found), by_formula(mamba, values, x), rtol=1e-3, atol=2e-3)
    for states in cache:
        assert states[2].isfinite().all()
        assert states[[0, 1, 3]].isnan().all()


def test_a_saved_state_goes_on_as_the_sequence_did() -> None:
    mamba = layer()
    fill(mamba)
    mamba.bind(kernels())
    x, cache = 0.3 * torch.randn(LENGTH, HIDDEN), caches(mamba)
    whole = mamba(x, cache, metadata(2, LENGTH, is_new=True, saves=((4, 0), (LENGTH, 3))))
    for states in cache:
        assert torch.equal(states[3], states[2])
    rest = mamba(x[4:], cache, metadata(0, LENGTH - 4, is_new=False))
    torch.testing.assert_close(rest, whole[4:], rtol=1e-4, atol=1e-4)


def test_its_parameters_keep_their_precision_and_its_projections_are_quantized() -> None:
    mamba = layer()
    fill(mamba, "mxfp8")
    quantized = {weight.name for weight in mamba.weights() if weight.decision.quantized}
    assert quantized == {"m.in_proj.weight", "m.out_proj.weight"}
    assert {weight.name for weight in mamba.weights() if weight.role.keeps_precision} == {"m.A_log", "m.D", "m.dt_bias"}
    mamba.bind(kernels())
    (chosen,) = mamba.chosen
    assert (chosen.operation, chosen.layer, chosen.weights) == ("mamba2", "m", ())
