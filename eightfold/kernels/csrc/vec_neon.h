// fp32 vectors of AArch64's NEON, which every such processor has. The accounts of the conversions are in vec_avx512.h.
#pragma once

namespace eightfold {
namespace {

using Vec = float32x4_t;
constexpr int kLanes = 4;
constexpr int kGemmTokens = 6;

inline Vec splat(float value) { return vdupq_n_f32(value); }
inline Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
inline Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
inline Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
inline Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
inline Vec max(Vec a, Vec b) { return vmaxq_f32(a, b); }
inline Vec min(Vec a, Vec b) { return vminq_f32(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
inline Vec round(Vec a) { return vrndnq_f32(a); }
inline Vec ldexp(Vec a, Vec n) {  // a * 2^n for integral n in -126..127
  return vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23)));
}

inline Vec sum4(Vec a, Vec b, Vec c, Vec d) { return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)); }
inline void store4(float* target, Vec value) { vst1q_f32(target, value); }
inline void add_to(float* target, Vec value) { vst1q_f32(target, vaddq_f32(vld1q_f32(target), value)); }
inline float sum(Vec a) { return vaddvq_f32(a); }
inline float max_lane(Vec a) { return vmaxvq_f32(a); }

inline Vec load(const float* p) { return vld1q_f32(p); }
inline Vec load(const bf16* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(p)), 16));
}
inline Vec load(const fp16* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(p))));
}

constexpr float kE4M3Unit = 256.0f;
inline int16x8_t widen(std::uint32_t bytes) { return vmovl_s8(vcreate_s8(bytes)); }
inline Vec load(const e4m3* p) {
  std::uint32_t bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  const uint16x4_t moved = vreinterpret_u16_s16(vshl_n_s16(vget_low_s16(widen(bytes)), 7));
  return vcvt_f32_f16(vreinterpret_f16_u16(vand_u16(moved, vdup_n_u16(0xBF80))));
}
inline Vec load_scales(const std::uint8_t* p) {
  std::uint32_t bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  const uint16x4_t narrow = vget_low_u16(vmovl_u8(vcreate_u8(bytes)));
  return vreinterpretq_f32_u32(vmaxq_u32(vshlq_n_u32(vmovl_u16(narrow), 23), vdupq_n_u32(0x00400000)));
}

inline void store(float* p, Vec v) { vst1q_f32(p, v); }
inline void store(bf16* p, Vec v) {
  const uint32x4_t bits = vreinterpretq_u32_f32(v);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF))), 16);
  rounded = vbslq_u32(vceqq_f32(v, v), rounded, vdupq_n_u32(0x7FC0));
  vst1_u16(reinterpret_cast<std::uint16_t*>(p), vmovn_u32(rounded));
}

}  // namespace
}  // namespace eightfold
