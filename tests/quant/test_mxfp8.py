"""The format: against transformers bit for bit, against fp64 formulas, and each statement of the module's text."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from eightfold.quant import mxfp8
from eightfold.quant.mxfp8 import MXTensor, ScaleRule, dequantize, fold, num_blocks, quantize, sqnr_db

DTYPES = [torch.bfloat16, torch.float16, torch.float32]

# Each statement of the module's text, and the test that holds it.
STATEMENTS = {
    "its value is `q * 2^(e - 127)`": "test_every_code_times_every_scale",
    "Storage is 33/32 bytes an element": "test_storage",
    "the smallest power of two that is at least `amax / 448`": "test_ceil_is_the_smallest_scale_that_fits",
    "No element saturates": "test_ceil_never_saturates",
    "what transformers, ModelOpt and the vendors' libraries write": "test_equals_transformers",
    "`2^(floor(log2 amax) - 8)`": "test_floor_by_its_formula",
    "saturate": "test_floor_saturates_between_448_and_512",
    "never by a logarithm": "test_just_above_a_power_of_two",
    "A block of zeros gets the byte 127": "test_zero_blocks",
    "never goes below byte 1": "test_blocks_of_subnormals",
    "The byte 255 is NaN and is never written": "test_no_scale_is_nan",
    "NaN and infinity in the input are refused": "test_values_that_are_not_finite_are_refused",
    "K that is no multiple of 32 ends in a shorter block": "test_a_short_last_block_equals_padding_with_zeros",
    "f[n, k] = E4M3(q[n, k] * 2^(e[n, g] - t[n]))": "test_fold_by_its_formula",
    "at most half of that, 2^-10 * r[n]": "test_fold_keeps_its_bound",
    "the error is under 4.4e-6 of it": "test_fold_keeps_its_bound",
    "Blocks of zeros have no say in t[n]": "test_zero_blocks_do_not_set_the_row_scale",
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mixed(dtype: torch.dtype, spread: float, *, rows: int = 65, k: int = 576, seed: int = 0) -> Tensor:
    """Blocks of very different magnitude, with zeros, and subnormals where the dtype has room for them."""
    sizes = (spread * randn(rows, k // 32, seed=seed + 1)).exp().repeat_interleave(32, dim=1)
    w = (randn(rows, k, seed=seed) * sizes).clamp(-6e4, 6e4).to(dtype)
    w[3, :32] = 0
    w[5] = 0
    if dtype is not torch.float16:
        w[4, :64] = 1e-41
        w[4, 64:96] = 2.0**-126
    return w


def codes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def by_transformers(w: Tensor) -> tuple[Tensor, Tensor]:
    config = SimpleNamespace(weight_block_size=[1, 32], scale_fmt="ue8m0")
    made = Fp8Quantize(SimpleNamespace(quantization_config=config))._quantize_one("x.weight", w)
    return codes(made["x.weight"]), codes(made["x.weight_scale_inv"])


def exact_blocks(w: Tensor) -> Tensor:
    """`[R, G, 32]` in fp64, padded with zeros."""
    padded = torch.nn.functional.pad(w.double(), (0, -w.shape[-1] % 32))
    return padded.unflatten(-1, (-1, 32))


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 12.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_transformers(dtype: torch.dtype, spread: float) -> None:
    w = mixed(dtype, spread)
    data, scale = by_transformers(w)
    found = quantize(w)
    assert torch.equal(codes(found.data), data)
    assert torch.equal(found.scale, scale)


def test_every_code_times_every_scale() -> None:
    """All 256 x 256 products against the definition of the two types, in Python."""

    def e4m3(code: int) -> float:
        sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 0xF, code & 7
        if exponent == 15 and mantissa == 7:
            return math.nan
        return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))

    all_codes = torch.arange(256, dtype=torch.uint8)
    data = all_codes.repeat_interleave(32).repeat(256, 1)  # a row for each scale, a block for each code
    scale = all_codes.unsqueeze(1).expand(256, 256).contiguous()
    found = dequantize(MXTensor(data.view(torch.float8_e4m3fn), scale))
    exact = [[e4m3(code) * 2.0 ** (byte - 127) if byte != 255 else math.nan for code in range(256)] for byte in range(256)]
    expected = torch.tensor(exact, dtype=torch.float64).float().repeat_interleave(32, dim=1)  # overflow becomes infinity
    assert torch.equal(found.nan_to_num(7.5, 8.5, 9.5), expected.nan_to_num(7.5, 8.5, 9.5))
    assert torch.equal(found.isnan(), expected.isnan())


@pytest.mark.parametrize("exponent", [-124, 0, 119])
def test_bf16_holds_every_code_exactly(exponent: int) -> None:
    finite = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    mx = MXTensor(finite.view(torch.float8_e4m3fn).unsqueeze(0), torch.full((1, 8), 127 + exponent, dtype=torch.uint8))
    assert torch.equal(dequantize(mx, torch.bfloat16).float(), dequantize(mx))


def test_storage() -> None:
    mx = quantize(randn(10, 64))
    assert mx.nbytes == 10 * 64 + 10 * 2
    assert mx.data.dtype == torch.float8_e4m3fn
    assert mx.scale.dtype == torch.uint8


@given(st.floats(2.0**-110, 2.0**110, width=32))
def test_ceil_is_the_smallest_scale_that_fits(amax: float) -> None:
    byte = int(quantize(torch.tensor([amax])).scale)
    assert 448 * 2.0 ** (byte - 127) >= amax * (1 - 2.0**-23)  # the division by 448 is rounded
    assert 448 * 2.0 ** (byte - 128) < amax * (1 + 2.0**-23)


@given(st.lists(st.floats(-(2.0**120), 2.0**120, width=32), min_size=1, max_size=40))
def test_ceil_never_saturates(values: list[float]) -> None:
    w = torch.tensor(values)
    scale = torch.exp2(quantize(w).scale.double() - 127)
    largest = exact_blocks(w.unsqueeze(0))[0].abs().amax(dim=-1)
    assert bool((largest <= 448 * scale * (1 + 2.0**-23)).all())


def test_just_above_a_power_of_two() -> None:
    """The next fp32 number above 448 * 2^k: a logarithm in fp32 rounds it down, and transformers' scale is then one too small.

    The element saturates there by one unit in the last place of fp32, which its code does not show; ours has the larger scale.
    """
    differ = 0
    for k in range(-40, 41):
        largest = torch.nextafter(torch.tensor(448.0 * 2.0**k), torch.tensor(torch.inf))
        w = torch.zeros(1, 32)
        w[0, 0] = largest
        byte = int(quantize(w).scale)
        ratio = float(largest / 448)
        assert byte == 127 + k + (ratio > 2.0**k)
        differ += byte != int(by_transformers(w)[1])
    assert differ > 0


def test_floor_by_its_formula() -> None:
    for value in (1.0, 1.99, 2.0, 447.0, 448.0, 500.0, 511.9, 512.0, 3e-20, 1e30):
        w = torch.full((1, 32), value)
        mx = quantize(w, ScaleRule.FLOOR)
        exponent = math.floor(math.log2(float(w[0, 0]))) - 8
        assert int(mx.scale) == exponent + 127
        expected = torch.tensor(min(float(w[0, 0]) / 2.0**exponent, 448.0)).to(torch.float8_e4m3fn)
        assert torch.equal(codes(mx.data), codes(expected.expand(1, 32)))


def test_floor_saturates_between_448_and_512() -> None:
    w = torch.zeros(1, 32)
    w[0, 0] = 500.0
    assert float(dequantize(quantize(w, ScaleRule.FLOOR))[0, 0]) == 448.0
    assert float(dequantize(quantize(w, ScaleRule.CEIL))[0, 0]) == 512.0


@pytest.mark.parametrize("rule", ScaleRule)
def test_zero_blocks(rule: ScaleRule) -> None:
    w = randn(2, 96)
    w[0, 32:64] = 0
    w[1, :] = -0.0
    mx = quantize(w, rule)
    assert int(mx.scale[0, 1]) == 127
    assert mx.scale[1].tolist() == [127] * 3
    assert torch.equal(dequantize(mx)[0, 32:64], torch.zeros(32))
    assert torch.equal(dequantize(mx)[1], torch.zeros(96))


def test_blocks_of_subnormals() -> None:
    w = torch.full((1, 64), 2.0**-149)
    w[0, 32:] = 1e-38
    assert quantize(w).scale.tolist() == [[1, 1]]
    assert torch.equal(dequantize(quantize(w))[0, :32], torch.zeros(32))
    assert quantize(w, ScaleRule.FLOOR).scale.tolist() == [[0, 0]]
    assert torch.allclose(dequantize(quantize(w, ScaleRule.FLOOR))[0, 32:], w[0, 32:], rtol=2**-4)


@pytest.mark.parametrize("rule", ScaleRule)
def test_no_scale_is_nan(rule: ScaleRule) -> None:
    w = torch.tensor([[torch.finfo(torch.float32).max] * 32, [2.0**127] * 32, [2.0**-149] * 32])
    mx = quantize(w, rule)
    assert int(mx.scale.max()) < 255
    assert not bool(mx.data.float().isnan().any())
    assert bool(dequantize(mx)[1:].isfinite().all())  # the first row rounds up to 2^128, which fp32 does not have


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_are_refused(dtype: torch.dtype, value: float) -> None:
    w = randn(300, 512).to(dtype)
    w[299, 33] = value
    with pytest.raises(ValueError, match=rf"got {value} at index \[299, 33\]"):
        quantize(w)


@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize("k", [1, 31, 32, 33, 100, 575])
def test_a_short_last_block_equals_padding_with_zeros(k: int, rule: ScaleRule) -> None:
    w = randn(7, k)
    padded = quantize(torch.nn.functional.pad(w, (0, -k % 32)), rule)
    found = quantize(w, rule)
    assert found.shape == (7, k)
    assert found.scale.shape == (7, num_blocks(k))
    assert torch.equal(found.scale, padded.scale)
    assert torch.equal(codes(found.data), codes(padded.data)[:, :k])
    assert torch.equal(dequantize(found), dequantize(padded)[:, :k])


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 40), (2, 2, 2, 33), (0, 64), (3, 0)])
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    w = randn(*shape)
    found = quantize(w)
    assert found.shape == shape
    assert dequantize(found).shape == shape
    if w.numel():
        flat = quantize(w.reshape(-1, shape[-1]))
        assert torch.equal(codes(found.data).reshape(-1, shape[-1]), codes(flat.data))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_values_never_pass_through_bf16(dtype: torch.dtype) -> None:
    """1.0625 + 2^-10 lies above the middle of the codes 1 and 1.125; bf16 would put it on the middle, which rounds to 1."""
    w = torch.zeros(1, 32, dtype=dtype)
    w[0, 0], w[0, 1] = 256.0, 1.0625 + 2.0**-10
    assert float(dequantize(quantize(w))[0, 1]) == 1.125
    assert float(dequantize(quantize(w.bfloat16()))[0, 1]) == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_input_is_left_alone_and_may_be_strided(dtype: torch.dtype) -> None:
    w = randn(64, 96).to(dtype)
    before = w.clone()
    turned = quantize(w.T)
    assert torch.equal(w, before)
    assert torch.equal(codes(turned.data), codes(quantize(w.T.contiguous()).data))


def test_out_may_be_a_view_of_something_larger() -> None:
    whole = mxfp8.empty((10, 40))
    w = randn(10, 40)
    quantize(w[:4], out=whole[:4])
    quantize(w[4:], out=whole[4:])
    assert torch.equal(codes(whole.data), codes(quantize(w).data))
    assert torch.equal(whole.scale, quantize(w).scale)


def test_wrong_arguments_name_what_is_expected() -> None:
    with pytest.raises(ValueError, match=r"float32, bfloat16 or float16, got torch\.int8"):
        quantize(torch.zeros(32, dtype=torch.int8))
    with pytest.raises(ValueError, match="at least one dimension"):
        quantize(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"\(2, 32\) to write into \(3, 32\)"):
        quantize(randn(2, 32), out=mxfp8.empty((3, 32)))
    with pytest.raises(ValueError, match=r"needs scales \(2, 2\), got \(2, 1\)"):
        MXTensor(torch.zeros(2, 33).to(torch.float8_e4m3fn), torch.zeros(2, 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="needs float8_e4m3fn data and uint8 scales"):
        MXTensor(torch.zeros(2, 32), torch.zeros(2, 1, dtype=torch.uint8))


def heavy(rows: int, k: int, seed: int) -> Tensor:
    """Student's t with three degrees of freedom."""
    return randn(rows, k, seed=seed) / (randn(3, rows, k, seed=seed + 1).square().sum(dim=0) / 3).sqrt()


def column_scaled(rows: int, k: int, seed: int) -> Tensor:
    return randn(rows, k, seed=seed) * (2 * randn(k, seed=seed + 1)).exp()


KINDS = {"gaussian": lambda rows, k, seed: randn(rows, k, seed=seed), "heavy": heavy, "column-scaled": column_scaled}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [31, 96, 576])
def test_fold_by_its_formula(kind: str, k: int) -> None:
    mx = quantize(KINDS[kind](9, k, 0))
    folded = fold(mx)
    blocks = exact_blocks(mx.data.float())
    exponent = mx.scale.int()
    t = exponent.amax(dim=-1, keepdim=True)
    expected = (blocks * torch.exp2((exponent - t).double()).unsqueeze(-1)).float().to(torch.float8_e4m3fn)
    assert torch.equal(folded.row_scale, t.squeeze(-1).to(torch.uint8))
    assert torch.equal(codes(folded.data), codes(expected.flatten(1))[:, :k].contiguous())


@given(st.sampled_from(sorted(KINDS)), st.integers(0, 10_000), st.integers(1, 200), st.sampled_from(ScaleRule))
def test_fold_keeps_its_bound(kind: str, seed: int, k: int, rule: ScaleRule) -> None:
    mx = quantize(KINDS[kind](4, k, seed), rule)
    folded = fold(mx)
    exact, found = dequantize(mx).double(), dequantize(folded.as_mxtensor()).double()
    r = torch.exp2(folded.row_scale.double() - 127).unsqueeze(-1)
    error = (found - exact).abs()
    assert bool((error <= 2.0**-10 * r).all())
    assert folded.max_error == float((error / r).max())
    norm = float(exact.norm())
    assert math.isclose(
        folded.relative_error, float((found - exact).norm()) / norm if norm else 0.0, rel_tol=1e-9, abs_tol=1e-30
    )
    if rule is ScaleRule.CEIL:
        assert bool((error < 4.4e-6 * exact.abs().amax(dim=-1, keepdim=True)).all())


def test_zero_blocks_do_not_set_the_row_scale() -> None:
    w = randn(3, 96) * 1e-3
    w[0, :32] = 0
    w[1] = 0
    folded = fold(quantize(w))
    assert int(folded.row_scale[0]) == int(quantize(w).scale[0, 1:].max()) < 127
    assert int(folded.row_scale[1]) == 127
    assert torch.allclose(dequantize(folded.as_mxtensor()), dequantize(quantize(w)), atol=1e-8)


def test_fold_refuses_nan() -> None:
    mx = quantize(randn(2, 64))
    mx.scale[1, 1] = 255
    with pytest.raises(ValueError, match="got NaN among the elements or scales"):
        fold(mx)
    mx = quantize(randn(2, 64))
    codes(mx.data)[0, 0] = 0x7F
    with pytest.raises(ValueError, match="got NaN"):
        fold(mx)


@pytest.mark.parametrize(
    ("kind", "low", "high"), [("gaussian", 3e-8, 4e-7), ("heavy", 5e-7, 2e-5), ("column-scaled", 5e-6, 4e-4)]
)
def test_what_folding_changes_is_far_below_what_the_format_does(kind: str, low: float, high: float) -> None:
    w = KINDS[kind](1024, 1024, 0)
    mx = quantize(w)
    assert low < fold(mx).relative_error < high
    noise = float((dequantize(mx) - w).norm() / w.norm())
    assert 0.024 < noise < 0.029


def test_sqnr_of_gaussian_weights() -> None:
    w = randn(512, 1024)
    assert 31.2 < sqnr_db(w, quantize(w)) < 31.8
    exact = dequantize(quantize(w))
    assert sqnr_db(exact, quantize(exact)) == math.inf
    assert sqnr_db(torch.zeros(1, 32), quantize(torch.zeros(1, 32))) == math.inf


def test_each_statement_of_the_text_has_its_test() -> None:
    text = " ".join((mxfp8.__doc__ or "").split())
    for statement, test in STATEMENTS.items():
        assert " ".join(statement.split()) in text, statement
        assert callable(globals()[test])
