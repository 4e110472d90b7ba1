// Vectors in plain C++, for processors that have no file of their own. Eight lanes let a compiler use what vectors it has.
#pragma once

namespace eightfold {
namespace {

constexpr int kLanes = 8;
constexpr int kGemmTokens = 2;
struct Vec {
  float lane[kLanes];
};

template <class F>
inline Vec each(F f) {
  Vec result;
  for (int i = 0; i < kLanes; ++i) result.lane[i] = f(i);
  return result;
}
inline float from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline Vec splat(float value) {
  return each([&](int) { return value; });
}
inline Vec add(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline Vec sub(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline Vec mul(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline Vec div(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.lane[i] / b.lane[i]; });
}
inline Vec max(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Vec min(const Vec& a, const Vec& b) {
  return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Vec fma(const Vec& a, const Vec& b, const Vec& c) {
  return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
}
inline Vec round(const Vec& a) {
  return each([&](int i) { return std::nearbyintf(a.lane[i]); });
}
inline Vec ldexp(const Vec& a, const Vec& n) {
  return each([&](int i) { return a.lane[i] * from_bits(static_cast<std::uint32_t>(static_cast<int>(n.lane[i]) + 127) << 23); });
}

inline float sum(const Vec& a) {
  float total = 0.0f;
  for (float value : a.lane) total += value;
  return total;
}
inline float max_lane(const Vec& a) {
  float largest = a.lane[0];
  for (float value : a.lane) largest = value > largest ? value : largest;
  return largest;
}
struct Four {
  float lane[4];
};
inline Four sum4(const Vec& a, const Vec& b, const Vec& c, const Vec& d) { return {{sum(a), sum(b), sum(c), sum(d)}}; }
inline void store4(float* target, const Four& value) { std::memcpy(target, value.lane, sizeof value.lane); }
inline void add_to(float* target, const Four& value) {
  for (int i = 0; i < 4; ++i) target[i] += value.lane[i];
}

inline Vec load(const float* p) {
  return each([&](int i) { return p[i]; });
}
inline Vec load(const bf16* p) {
  return each([&](int i) { return from_bits(static_cast<std::uint32_t>(p[i].bits) << 16); });
}
// Five exponent bits moved under fp32's eight; the factor puts the bias right.
inline Vec load(const fp16* p) {
  return each([&](int i) {
    const std::uint32_t bits = p[i].bits, exponent_ones = (bits & 0x7C00) == 0x7C00 ? 0x7F800000 : 0;
    const float magnitude = from_bits((bits & 0x7FFF) << 13) * 0x1p112f;
    std::uint32_t moved;
    std::memcpy(&moved, &magnitude, sizeof moved);
    return from_bits(moved | exponent_ones | (bits & 0x8000) << 16);
  });
}
constexpr float kE4M3Unit = 1.0f;
inline Vec load(const e4m3* p) {  // subnormals by arithmetic of their own: a processor may be set to flush fp32's to zero
  return each([&](int i) {
    const std::uint32_t bits = p[i].bits, magnitude = bits & 0x7F;
    const float value = magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9f : from_bits((magnitude << 20) + (120u << 23));
    return bits & 0x80 ? -value : value;
  });
}
inline Vec load_scales(const std::uint8_t* p) {
  return each([&](int i) { return from_bits(p[i] == 0 ? 0x00400000 : static_cast<std::uint32_t>(p[i]) << 23); });
}

inline void store(float* p, const Vec& v) { std::memcpy(p, v.lane, sizeof v.lane); }
inline void to_type(bf16* p, float value);
inline void store(bf16* p, const Vec& v) {
  for (int i = 0; i < kLanes; ++i) to_type(p + i, v.lane[i]);
}

}  // namespace
}  // namespace eightfold
