"""The format against transformers' quantizer, a decoder in plain Python, and its own rules as formulas.

`STATEMENTS` names the test of each statement in the docstring of `eightfold.quant.mxfp8`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from eightfold.quant import mxfp8
from eightfold.quant.mxfp8 import MXTensor, ScaleRule, dequantize, empty, fold, num_blocks, quantize, sqnr_db

STATEMENTS: Mapping[str, str] = {
    "one scale byte `e` of the type E8M0": "test_all_codes_under_all_scales_decode_as_plain_python_does",
    "An element is an E4M3 float `q`": "test_an_element_is_the_nearest_code_and_ties_go_to_even",
    "largest finite value 448, smallest subnormal 2^-9, no infinity": "test_the_codes_are_those_of_e4m3fn",
    "Storage is 33/32 bytes an element": "test_storage_is_33_32_bytes_an_element",
    "the smallest power of two that is at least `amax / 448`": "test_the_rules_are_their_formulas",
    "No element saturates": "test_ceil_never_saturates",
    "what transformers, ModelOpt and the vendors' libraries write": "test_bits_are_those_of_transformers",
    "`2^(floor(log2 amax) - 8)`": "test_the_rules_are_their_formulas",
    "lies between 448 and\n  512 scaled units saturate": "test_floor_saturates_between_448_and_512",
    "CEIL gives these the next larger scale, and all other blocks the same one": "test_the_rules_differ_where_floor_clips",
    "`log2` in fp32 rounds values just above a power of two\ndown to it": "test_where_a_logarithm_rounds_ours_does_not",
    "A block of zeros gets the byte 127": "test_blocks_of_zeros_have_scale_one",
    "never goes below byte 1 (2^-126)": "test_subnormals_keep_the_bits_that_are_left",
    "fp32 subnormals are rounded to multiples of 2^-135": "test_subnormals_keep_the_bits_that_are_left",
    "FLOOR goes down to byte 0": "test_subnormals_keep_the_bits_that_are_left",
    "The byte 255 is NaN and is never written": "test_no_finite_input_gives_the_scale_nan",
    "decodes to infinity in fp32": "test_the_largest_magnitudes_of_fp32_decode_to_infinity",
    "NaN and infinity in the input are refused": "test_nan_and_infinity_are_refused_with_their_index",
    "the missing elements count as zeros": "test_any_k_is_as_if_padded_with_zeros",
    "f[n, k] = E4M3(q[n, k] * 2^(e[n, g] - t[n])),    row scale r[n] = 2^t[n]": "test_fold_is_its_formula",
    "exact until an element reaches\nE4M3's subnormals": "test_fold_is_exact_above_the_subnormals",
    "the error of an element is at most half of that, 2^-10 * r[n]": "test_fold_keeps_its_bound",
    "largest magnitude of the row is over 224 * r[n]": "test_fold_keeps_its_bound",
    "Blocks of zeros have no say in t[n]": "test_blocks_of_zeros_do_not_set_the_scale_of_a_row",
}

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST = {torch.float32: 3e38, torch.bfloat16: 3e38, torch.float16: 6e4}
DISTRIBUTIONS: Mapping[str, Callable[[int, int], Tensor]] = {
    "gaussian": torch.randn,
    "heavy-tailed": lambda rows, k: torch.distributions.StudentT(torch.tensor(3.0)).sample((rows, k)),
    "column-scaled": lambda rows, k: torch.randn(rows, k) * torch.exp(2 * torch.randn(k)),
}


def made(distribution: str, rows: int, k: int, seed: int = 0) -> Tensor:
    """fp32 `[rows, k]`, the same at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DISTRIBUTIONS[distribution](rows, k)


def mixed(rows: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Elements of all magnitudes that `dtype` has, with a row and a block of zeros, negative zeros and a lone element."""
    generator = torch.Generator().manual_seed(seed)
    reach = math.log2(LARGEST[dtype]) - 10
    w = torch.randn(rows, k, generator=generator, dtype=torch.float64)
    w *= torch.exp2(torch.randint(-20, 3, (rows, k), generator=generator).double())
    w *= torch.exp2((torch.rand(rows, 1, generator=generator, dtype=torch.float64) * 2 - 1) * reach)
    w[0] = 0.0
    w[1, :32] = -0.0
    w[2, 1:32] = 0.0
    return w.to(dtype)


def bits(mx: MXTensor) -> tuple[Tensor, Tensor]:
    return mx.data.view(torch.uint8), mx.scale


def assert_same_bits(found: MXTensor, expected: MXTensor) -> None:
    for left, right in zip(bits(found), bits(expected), strict=True):
        assert torch.equal(left, right), f"{int((left != right).sum())} bytes differ"


def by_transformers(w: Tensor) -> MXTensor:
    config = SimpleNamespace(weight_block_size=[1, 32], scale_fmt="ue8m0")
    quantizer = Fp8Quantize(SimpleNamespace(quantization_config=config))  # type: ignore[no-untyped-call]
    result = quantizer._quantize_one("layer.weight", w)
    return MXTensor(result["layer.weight"], result["layer.weight_scale_inv"].view(torch.uint8))


def decoded(code: int) -> float:
    """The value of an E4M3 code, from its bits."""
    sign, exponent, mantissa = -1 if code & 0x80 else 1, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10))


def as_fp32(value: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def scales(scale: Tensor) -> Tensor:
    """Scale bytes as fp64 values."""
    return torch.exp2(scale.double() - 127)


def rounded_to_e4m3(values: Tensor) -> Tensor:
    """fp64 values below 448 rounded to the nearest multiple of their E4M3 spacing, ties to even."""
    exponent = torch.frexp(values.abs())[1].double() - 1
    spacing = torch.exp2(exponent.clamp(min=-6) - 3)
    return torch.round(values / spacing) * spacing


# The format.


def test_the_codes_are_those_of_e4m3fn() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    expected = torch.tensor([decoded(code) for code in range(256)], dtype=torch.float64)
    assert torch.equal(codes.nan_to_num(999), expected.nan_to_num(999))
    finite = codes[codes.isfinite()]
    assert finite.max() == mxfp8.E4M3_MAX == 448
    assert finite[finite > 0].min() == 2**-9
    assert not codes.isinf().any()


def test_all_codes_under_all_scales_decode_as_plain_python_does() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(1, 8)
    found = dequantize(MXTensor(codes.view(torch.float8_e4m3fn), scale))
    for byte in range(256):
        factor = math.nan if byte == 255 else math.ldexp(1.0, byte - 127)
        expected = torch.tensor([as_fp32(decoded(code) * factor) for code in range(256)])
        assert torch.equal(found[byte].isnan(), expected.isnan())
        assert torch.equal(found[byte].nan_to_num(0, torch.inf, -torch.inf), expected.nan_to_num(0, torch.inf, -torch.inf))


def test_bf16_holds_every_value_while_the_exponent_lies_in_its_range() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(244, 1)
    scale = torch.arange(127 - 124, 127 + 120, dtype=torch.uint8).unsqueeze(1).repeat(1, 8)
    mx = MXTensor(codes.view(torch.float8_e4m3fn), scale)
    assert torch.equal(dequantize(mx, torch.bfloat16).float().nan_to_num(1), dequantize(mx).nan_to_num(1))


def test_storage_is_33_32_bytes_an_element() -> None:
    assert quantize(torch.ones(4, 64)).nbytes == 4 * 64 * 33 // 32


def test_an_mxtensor_checks_what_it_is_made_of() -> None:
    mx = quantize(torch.ones(4, 64))
    with pytest.raises(ValueError, match="uint8"):
        MXTensor(mx.data, mx.scale.int())
    with pytest.raises(ValueError, match=r"needs scales \(4, 2\)"):
        MXTensor(mx.data, mx.scale[:, :1])


def test_rows_are_views_and_a_vector_has_none() -> None:
    mx = quantize(made("gaussian", 4, 64))
    assert mx[1:3].data.data_ptr() == mx.data[1:].data_ptr()
    assert_same_bits(mx[2], MXTensor(mx.data[2], mx.scale[2]))
    with pytest.raises(IndexError):
        mx[0][0:1]


# Quantizing.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(4))
def test_bits_are_those_of_transformers(dtype: torch.dtype, seed: int) -> None:
    w = mixed(300, 256, dtype, seed)
    assert_same_bits(quantize(w), by_transformers(w))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_bits_are_those_of_transformers_on_weights(distribution: str) -> None:
    w = made(distribution, 128, 1024).bfloat16()
    assert_same_bits(quantize(w), by_transformers(w))


def test_bits_are_those_of_transformers_on_zeros_and_subnormals() -> None:
    w = torch.zeros(40, 32)
    w[1:] = torch.exp2(torch.arange(-149, -110).float()).unsqueeze(1) * torch.linspace(-1, 1, 32)
    assert (w[1:20] != 0).any()
    assert_same_bits(quantize(w), by_transformers(w))


def test_tensors_of_more_dimensions_are_quantized_along_the_last() -> None:
    w = made("gaussian", 12, 64)
    mx = quantize(w.view(2, 6, 64))
    assert mx.scale.shape == (2, 6, 2)
    assert_same_bits(MXTensor(mx.data.view(12, 64), mx.scale.view(12, 2)), quantize(w))
    assert_same_bits(quantize(w[3]), quantize(w)[3])


@pytest.mark.parametrize("k", [31, 32, 100])
def test_chunks_of_rows_do_not_show(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w = mixed(50, k, torch.float32)
    whole, folded = quantize(w), fold(quantize(w))
    monkeypatch.setattr(mxfp8, "_CHUNK_ELEMENTS", 3 * k)
    assert_same_bits(quantize(w), whole)
    assert torch.equal(dequantize(whole), scales(whole.scale).repeat_interleave(32, 1)[:, :k].float() * whole.data.float())
    in_chunks = fold(whole)
    assert torch.equal(in_chunks.data.view(torch.uint8), folded.data.view(torch.uint8))
    assert in_chunks.relative_error == pytest.approx(folded.relative_error, rel=1e-9, abs=0)
    assert in_chunks.max_error == folded.max_error


def test_errors_of_folding_are_over_all_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    # The second block of the first row loses bits under the scale of the first block; the other rows lose nothing.
    w = torch.ones(3, 64)
    w[:, 32:] = torch.linspace(1, 2, 32) * 2.0**-17
    w[1:] = 1.0
    expected = fold(quantize(w))
    assert expected.max_error > 0
    monkeypatch.setattr(mxfp8, "_CHUNK_ELEMENTS", 64)
    for order in ([0, 1, 2], [1, 2, 0], [1, 0, 2]):
        folded = fold(quantize(w[order]))
        assert folded.max_error == expected.max_error
        assert folded.relative_error == pytest.approx(expected.relative_error, rel=1e-9, abs=0)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False).filter(bool))
def test_the_rules_are_their_formulas(value: float) -> None:
    amax = Fraction(abs(value))
    block = torch.zeros(1, 32)
    block[0, 7] = value
    ceil = int(quantize(block).scale) - 127
    assert ceil >= -126
    assert amax <= 448 * Fraction(2) ** ceil
    assert ceil == -126 or amax > 448 * Fraction(2) ** (ceil - 1)
    floor = int(quantize(block, ScaleRule.FLOOR).scale) - 127
    assert floor == max(math.frexp(abs(value))[1] - 1 - 8, -127)


def test_ceil_never_saturates() -> None:
    for dtype in DTYPES:
        w = mixed(200, 96, dtype)
        mx = quantize(w)
        units = w.double().abs() / scales(mx.scale).repeat_interleave(32, 1)
        assert units.max() <= 448
        assert ((mx.data.double().abs() - units).abs() <= (units / 16).clamp(min=2**-10)).all()


@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_is_the_nearest_code_and_ties_go_to_even(dtype: torch.dtype, rule: ScaleRule) -> None:
    # Multiples of 2^-10 beside one 448: every tie between two codes, and what lies between the ties.
    steps = torch.cat((torch.arange(4096), torch.arange(4096, 448 << 10, 61))).double() * 2**-10
    grid = torch.cat(
        (torch.full((-(-len(steps) // 31), 1), 448.0), torch.nn.functional.pad(steps, (0, -len(steps) % 31)).view(-1, 31)), 1
    )
    for w in (mixed(200, 96, dtype), grid.to(dtype), -grid.to(dtype)):
        mx = quantize(w, rule)
        units = (w.double() / scales(mx.scale).repeat_interleave(32, 1)).clamp(-448, 448)
        assert torch.equal(mx.data.double(), rounded_to_e4m3(units))


@pytest.mark.parametrize("k", [-100, -10, 0, 3, 10, 60, 100, 119])
def test_where_a_logarithm_rounds_ours_does_not(k: int) -> None:
    at = torch.tensor(448.0) * 2.0**k
    above = torch.nextafter(at, torch.tensor(torch.inf))
    for amax, expected in ((at, k), (above, k + 1), (torch.nextafter(at, torch.tensor(0.0)), k)):
        mx = quantize(amax.repeat(1, 32))
        assert int(mx.scale) - 127 == expected
        assert float(amax) / 2.0**expected <= 448
    if abs(k) >= 10:
        theirs = by_transformers(above.repeat(1, 32))
        assert int(theirs.scale) - 127 == k  # so 448 and a little is clipped
        assert float(above) / 2.0**k > 448


def test_floor_saturates_between_448_and_512() -> None:
    w = torch.zeros(1, 32)
    for units, expected in ((448.0, 448.0), (464.0, 448.0), (500.0, 448.0), (511.0, 448.0), (256.0, 256.0)):
        w[0, 3] = units * 2**-20
        mx = quantize(w, ScaleRule.FLOOR)
        assert int(mx.scale) == 127 - 20
        assert float(mx.data[0, 3]) == expected


def test_the_rules_differ_where_floor_clips() -> None:
    w = made("gaussian", 256, 1024)
    ceil, floor = quantize(w), quantize(w, ScaleRule.FLOOR)
    units = w.view(256, 32, 32).abs().amax(-1).double() / scales(floor.scale)
    assert torch.equal(ceil.scale.int() - floor.scale.int(), (units > 448).int())
    assert sqnr_db(w, floor) < sqnr_db(w, ceil)


def test_blocks_of_zeros_have_scale_one() -> None:
    for rule in ScaleRule:
        mx = quantize(torch.zeros(3, 70), rule)
        assert (mx.scale == 127).all()
        assert torch.equal(dequantize(mx), torch.zeros(3, 70))


def test_subnormals_keep_the_bits_that_are_left() -> None:
    w = torch.exp2(torch.arange(-149, -126).float()).unsqueeze(1) * torch.linspace(-1, 1, 32)
    for rule, byte in ((ScaleRule.CEIL, 1), (ScaleRule.FLOOR, 0)):
        mx = quantize(w, rule)
        assert (mx.scale == byte).all()
        error, spacing = (dequantize(mx).double() - w.double()).abs(), 2.0 ** (byte - 127 - 9)
        assert (error <= (w.abs().double() / 16).clamp(min=spacing / 2)).all()
    assert not dequantize(quantize(torch.full((1, 32), 2.0**-136))).any()


def test_the_largest_magnitudes_of_fp32_decode_to_infinity() -> None:
    limit = 248 * 2.0**120  # halfway between 240 and 256 units of 2^120, and goes to the even code
    for value, expected in ((limit * 0.9999, 240 * 2.0**120), (limit, torch.inf)):
        assert float(dequantize(quantize(torch.full((1,), value)))) == expected
    assert 0.96 < limit / torch.finfo(torch.float32).max < 0.97


def test_no_finite_input_gives_the_scale_nan() -> None:
    for dtype in DTYPES:
        w = torch.full((1, 32), torch.finfo(dtype).max, dtype=dtype)
        for rule in ScaleRule:
            assert int(quantize(w, rule).scale) < mxfp8.SCALE_NAN - 1
            assert quantize(w, rule).data.float().isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_are_refused_with_their_index(value: float, dtype: torch.dtype) -> None:
    w = torch.ones(3, 4, 100, dtype=dtype)
    w[1, 2, 97] = value
    w[2, 0, 0] = value
    with pytest.raises(ValueError, match=rf"got {value} at index \[1, 2, 97\]"):
        quantize(w)


@pytest.mark.parametrize("k", [1, 31, 33, 100])
@pytest.mark.parametrize("rule", ScaleRule)
def test_any_k_is_as_if_padded_with_zeros(k: int, rule: ScaleRule) -> None:
    w = mixed(20, max(k, 32), torch.float32)[:, :k]
    padded = torch.nn.functional.pad(w, (0, -k % 32))
    mx, expected = quantize(w, rule), quantize(padded, rule)
    assert mx.scale.shape == (20, num_blocks(k))
    assert_same_bits(mx, MXTensor(expected.data[:, :k], expected.scale))
    assert torch.equal(dequantize(mx), dequantize(expected)[:, :k])
    assert torch.equal(fold(mx).row_scale, fold(expected).row_scale)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0,)])
def test_nothing_is_quantized_to_nothing(shape: tuple[int, ...]) -> None:
    mx = quantize(torch.zeros(shape))
    assert dequantize(mx).shape == shape
    assert fold(mx).relative_error == 0.0


def test_other_dtypes_scalars_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        quantize(torch.ones(2, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match="scalar"):
        quantize(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"\(2, 32\) to write into \(2, 64\)"):
        quantize(torch.ones(2, 32), out=empty((2, 64)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_fp16_and_fp32_never_pass_through_bf16(dtype: torch.dtype) -> None:
    # Of 449 units bf16 makes 448 (or 450): either the scale or the element tells.
    w = torch.full((1, 32), 449.0, dtype=dtype)
    assert int(quantize(w).scale) == 128
    assert int(quantize(w.bfloat16()).scale) == 127
    # 1.0635 lies above the middle of the codes 1 and 1.125; bf16 makes it the middle, which goes to the even code.
    w = torch.full((1, 32), 1.0635, dtype=dtype)
    w[0, 0] = 448.0
    assert float(quantize(w).data[0, 1]) == 1.125
    assert float(quantize(w.bfloat16()).data[0, 1]) == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [64, 70])
def test_the_input_is_never_modified(dtype: torch.dtype, k: int) -> None:
    w = mixed(9, k, dtype)
    before = w.clone()
    mx = quantize(w)
    elements, byte_scales = (part.clone() for part in bits(mx))
    fold(mx)
    dequantize(mx)
    sqnr_db(w, mx)
    assert torch.equal(w, before)
    assert torch.equal(mx.data.view(torch.uint8), elements)
    assert torch.equal(mx.scale, byte_scales)


def test_out_may_be_rows_of_a_larger_tensor() -> None:
    w = mixed(6, 70, torch.float32)
    fused = MXTensor(torch.zeros(10, 70, dtype=torch.float8_e4m3fn), torch.zeros(10, 3, dtype=torch.uint8))
    out = fused[2:8]
    assert quantize(w, out=out) is out
    assert_same_bits(fused[2:8], quantize(w))
    for part in bits(fused):
        assert not part[:2].any()
        assert not part[8:].any()


def test_strided_input_is_taken_as_it_is() -> None:
    w = made("gaussian", 64, 48)
    assert_same_bits(quantize(w.T), quantize(w.T.contiguous()))


def test_signal_to_noise_of_gaussian_weights() -> None:
    w = made("gaussian", 256, 2048)
    assert 31.2 < sqnr_db(w, quantize(w)) < 31.8
    noise = (dequantize(quantize(w)).double() - w.double()).square().sum() / w.double().square().sum()
    assert sqnr_db(w, quantize(w)) == pytest.approx(-10 * math.log10(noise), abs=1e-9)
    assert sqnr_db(torch.ones(2, 32), quantize(torch.ones(2, 32))) == math.inf
    assert sqnr_db(torch.zeros(2, 32), quantize(torch.ones(2, 32))) == -math.inf


# Folding.


def fold_by_formula(mx: MXTensor) -> tuple[Tensor, Tensor, Tensor]:
    """Folded elements, the exact ones in units of the row's scale, and row bytes, in fp64 from the formula."""
    k = mx.shape[-1]
    elements = mx.data.double()
    zero = torch.nn.functional.pad(elements, (0, -k % 32)).unflatten(-1, (-1, 32)).eq(0).all(-1)
    byte = mx.scale.double().masked_fill(zero, -torch.inf).amax(-1)
    byte[byte.isinf()] = 127.0
    exact = elements * torch.exp2(mx.scale.double() - byte.unsqueeze(-1)).repeat_interleave(32, -1)[..., :k]
    return rounded_to_e4m3(exact), exact, byte


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("k", [32, 100, 1024])
def test_fold_is_its_formula(distribution: str, k: int) -> None:
    mx = quantize(made(distribution, 64, k))
    folded = fold(mx)
    expected, exact, byte = fold_by_formula(mx)
    assert torch.equal(folded.data.double(), expected)
    assert torch.equal(folded.row_scale.double(), byte)
    row = scales(folded.row_scale).unsqueeze(-1)
    change = ((expected - exact) * row).norm() / (exact * row).norm()
    assert folded.relative_error == pytest.approx(float(change), rel=1e-9, abs=0)
    assert folded.max_error == float((expected - exact).abs().max())
    assert torch.equal(dequantize(folded.as_mxtensor()).double(), expected * row)


def test_fold_of_all_magnitudes_is_its_formula() -> None:
    mx = quantize(mixed(100, 512, torch.float32))
    assert torch.equal(fold(mx).data.double(), fold_by_formula(mx)[0])


def test_fold_is_exact_above_the_subnormals() -> None:
    mx = quantize(made("column-scaled", 64, 512))
    _, exact, _ = fold_by_formula(mx)
    changed = fold(mx).data.double() != exact
    assert changed.any()
    assert exact[changed].abs().max() < 2**-6


@given(
    distribution=st.sampled_from(sorted(DISTRIBUTIONS)),
    rule=st.sampled_from(ScaleRule),
    rows=st.integers(1, 9),
    k=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-100, 100),
)
def test_fold_keeps_its_bound(distribution: str, rule: ScaleRule, rows: int, k: int, seed: int, exponent: int) -> None:
    w = made(distribution, rows, k, seed) * 2.0**exponent
    mx = quantize(w, rule)
    folded = fold(mx)
    row = scales(folded.row_scale).unsqueeze(-1)
    error = (folded.data.double() * row - mx.data.double() * scales(mx.scale).repeat_interleave(32, -1)[:, :k]).abs()
    assert (error <= 2**-10 * row).all()
    assert folded.max_error == float((error / row).max()) <= 2**-10
    if rule is ScaleRule.CEIL:
        largest = w.abs().amax(-1, keepdim=True).double()
        assert (largest > 224 * row).all()
        assert (error <= 4.4e-6 * largest).all()


def test_blocks_of_zeros_do_not_set_the_scale_of_a_row() -> None:
    w = made("gaussian", 3, 96) * 2.0**-60
    w[0, 32:64] = 0.0
    w[1] = 0.0
    mx = quantize(w)
    folded = fold(mx)
    assert int(mx.scale[0, 1]) == 127
    assert int(folded.row_scale[0]) == int(mx.scale[0, [0, 2]].max()) < 80
    assert int(folded.row_scale[1]) == 127
    assert folded.max_error == 0.0


def test_fold_refuses_nan() -> None:
    mx = quantize(torch.ones(2, 64))
    broken = mx.scale.clone()
    broken[1, 1] = 255
    with pytest.raises(ValueError, match="NaN"):
        fold(MXTensor(mx.data, broken))
    with pytest.raises(ValueError, match="NaN"):
        fold(MXTensor(torch.full((2, 64), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn), mx.scale))


@pytest.mark.parametrize(("distribution", "size"), [("gaussian", 1e-7), ("heavy-tailed", 3e-6), ("column-scaled", 4e-5)])
def test_folding_changes_as_little_as_the_design_says(distribution: str, size: float) -> None:
    error = fold(quantize(made(distribution, 256, 4096))).relative_error
    assert size / 4 < error < size * 4


# The essay.


def test_every_statement_of_the_essay_names_its_test() -> None:
    essay = mxfp8.__doc__ or ""
    for statement, test in STATEMENTS.items():
        assert statement in essay, statement
        assert callable(globals().get(test)), test
