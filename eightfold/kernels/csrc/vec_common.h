// What every instruction set shares, over the operations of its vec_*.h: conversions of rows, sums, the exponential.
#pragma once

#include <type_traits>

namespace eightfold {
namespace {

inline std::int64_t at_most(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline std::int64_t at_least(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
inline std::int64_t round_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b * b; }

// Asks for the cache line `bytes` after p, which need not be memory of ours.
inline void prefetch(const void* p, std::uintptr_t bytes) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(p) + bytes));
}

inline void to_type(float* p, float value) { *p = value; }
inline void to_type(bf16* p, float value) {  // to nearest, ties to even; NaN stays NaN
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const std::uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  p->bits = static_cast<std::uint16_t>(value != value ? 0x7FC0 : rounded);
}

// Up to kLanes elements; the missing ones are zero, and are not written.
template <class T>
inline Vec load_part(const T* p, std::int64_t count) {
  if (count >= kLanes) return load(p);
  T buffer[kLanes];
  std::memset(buffer, 0, sizeof buffer);
  std::memcpy(buffer, p, count * sizeof(T));
  return load(buffer);
}
template <class T>
inline void store_part(T* p, Vec value, std::int64_t count) {
  if (count >= kLanes) return store(p, value);
  T buffer[kLanes];
  store(buffer, value);
  std::memcpy(p, buffer, count * sizeof(T));
}

// Writes `count` scales and up to kLanes - 1 more.
inline void convert_scales(const std::uint8_t* bytes, std::int64_t count, float* scales) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(scales + i, load_scales(bytes + i));
  if (i < count) {
    std::uint8_t rest[kLanes] = {};
    std::memcpy(rest, bytes + i, count - i);
    store(scales + i, load_scales(rest));
  }
}

inline void convert_row(const bf16* from, std::int64_t count, bf16* to) { std::memcpy(to, from, count * sizeof(bf16)); }
template <class T>
inline void convert_row(const T* from, std::int64_t count, float* to) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  if (i < count) store_part(to + i, load_part(from + i, count - i), count - i);
}

// e^x to about 2 units in the last place, for x clamped to -87 .. 88: x = n ln 2 + r with |r| <= ln 2 / 2, and a polynomial in r.
inline Vec exponential(Vec x) {
  x = min(max(x, splat(-87.0f)), splat(88.0f));
  const Vec n = round(mul(x, splat(1.44269504f)));
  Vec r = fma(n, splat(-0.693359375f), x);  // ln 2 in two parts, of which the first times n is exact
  r = fma(n, splat(2.12194440e-4f), r);
  constexpr float kTaylor[] = {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  Vec p = splat(1.0f / 720);
  for (float coefficient : kTaylor) p = fma(p, r, splat(coefficient));
  return ldexp(p, n);
}

// to[i] = from[i] * factor
template <class T>
inline void write_scaled(const float* from, float factor, std::int64_t count, T* to) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    store_part(to + i, mul(load_part(from + i, count - i), splat(factor)), count - i);
  }
}

// Rows as `E [rows, padded]`, zero past `width`: the input itself where nothing has to change, else the calling thread's scratch.
template <class E, class T>
const E* padded_rows(const T* from, std::int64_t rows, std::int64_t width, std::int64_t padded) {
  if constexpr (std::is_same<E, T>::value) {
    if (width == padded) return from;
  }
  auto* to = static_cast<E*>(thread_scratch(kInputSlot, rows * padded * sizeof(E)));
  for (std::int64_t r = 0; r < rows; ++r) {
    convert_row(from + r * width, width, to + r * padded);
    std::memset(to + r * padded + width, 0, (padded - width) * sizeof(E));
  }
  return to;
}

// What gemm_tile multiplies; an instruction set with products of bf16 pairs has a second load_operand.
inline Vec load_operand(const float* p) { return load(p); }

}  // namespace
}  // namespace eightfold
