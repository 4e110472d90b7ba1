// fp32 vectors of AVX-512 (F, BW, DQ, VL). With EIGHTFOLD_AVX512_BF16 also the product of bf16 pairs.
#pragma once

namespace eightfold {
namespace {

using Vec = __m512;
constexpr int kLanes = 16;
constexpr int kGemmTokens = 6;  // 4 x 6 accumulators, 6 inputs and a weight: 31 of 32 registers

inline Vec splat(float value) { return _mm512_set1_ps(value); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec round(Vec a) { return _mm512_roundscale_ps(a, 0); }
inline Vec ldexp(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }  // a * 2^n for integral n
inline float sum(Vec a) { return _mm512_reduce_add_ps(a); }
inline float max_lane(Vec a) { return _mm512_reduce_max_ps(a); }

// The sums of four vectors, side by side.
inline __m256 halves(Vec v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); }
inline __m128 sum4(Vec a, Vec b, Vec c, Vec d) {
  const __m256 ab = _mm256_hadd_ps(halves(a), halves(b));
  const __m256 cd = _mm256_hadd_ps(halves(c), halves(d));
  const __m256 abcd = _mm256_hadd_ps(ab, cd);
  return _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
}
inline void store4(float* target, __m128 value) { _mm_storeu_ps(target, value); }
inline void add_to(float* target, __m128 value) { _mm_storeu_ps(target, _mm_add_ps(_mm_loadu_ps(target), value)); }

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const bf16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline Vec load(const fp16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

// E4M3 as fp16: a byte's sign, exponent and mantissa, moved to their places in 16 bits, read as the element times 2^-8,
// subnormals included.
constexpr float kE4M3Unit = 256.0f;
inline Vec load(const e4m3* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xBF80))));
}

// E8M0 bytes as powers of two; 0 is the subnormal 2^-127.
inline Vec load_scales(const std::uint8_t* p) {
  const __m512i exponent = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(exponent, 23), _mm512_set1_epi32(0x00400000)));
}

inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline void store(bf16* p, Vec v) {  // to nearest, ties to even; NaN stays NaN
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}

#if defined(EIGHTFOLD_AVX512_BF16)
#define EIGHTFOLD_DOT_BF16 1
inline __m512bh load_operand(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline Vec fma(__m512bh a, __m512bh b, Vec c) { return _mm512_dpbf16_ps(c, a, b); }
inline void decode_block(const e4m3* from, float scale, bf16* out) {  // exact down to 2^-126
  const Vec low = mul(mul(load(from), splat(kE4M3Unit)), splat(scale));
  const Vec high = mul(mul(load(from + kLanes), splat(kE4M3Unit)), splat(scale));
  _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}
#endif

}  // namespace
}  // namespace eightfold
