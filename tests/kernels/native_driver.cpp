// Compares the kernels of this architecture's instruction sets with the scalar ones, which test_cpu.py compares with an oracle.
// test_native.py builds it for AArch64 and runs it under an emulator: the one way to see NEON's results on another machine.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels.h"

using namespace eightfold;

namespace {

constexpr double kTolerance = 2e-6;      // fp32 sums in another order, over the largest element
constexpr double kBf16Tolerance = 1e-2;  // two results that round to neighbouring bf16 numbers
int failures = 0;

std::uint32_t state = 1;
std::uint32_t next() { return state = state * 1664525 + 1013904223; }
float uniform() { return static_cast<float>(next() >> 8) / (1 << 23) - 1.0f; }

float from_bf16(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// A buffer of either activation type: made of uniform numbers, or of NaN for an output.
struct Buffer {
  Type type;
  std::vector<float> wide;
  std::vector<std::uint16_t> narrow;
  Buffer(Type t, std::size_t count, bool output = false) : type(t), wide(count), narrow(count) {
    for (std::size_t i = 0; i < count; ++i) {
      wide[i] = output ? NAN : uniform();
      std::uint32_t bits;
      std::memcpy(&bits, &wide[i], sizeof bits);
      narrow[i] = static_cast<std::uint16_t>(bits >> 16);
    }
  }
  void* data() { return type == Type::kFloat32 ? static_cast<void*>(wide.data()) : narrow.data(); }
  double at(std::size_t i) const { return type == Type::kFloat32 ? wide[i] : from_bf16(narrow[i]); }
};

void compare(const char* set, const char* what, const Buffer& got, const Buffer& expected) {
  double largest = 0, worst = 0;
  for (std::size_t i = 0; i < got.wide.size(); ++i) largest = std::fmax(largest, std::fabs(expected.at(i)));
  for (std::size_t i = 0; i < got.wide.size(); ++i) {
    const double error = std::fabs(got.at(i) - expected.at(i));
    if (!(error <= worst)) worst = error;
  }
  const bool good = worst <= largest * (got.type == Type::kFloat32 ? kTolerance : kBf16Tolerance);
  std::printf("%s %s %s: worst %.1e of %.1e%s\n", set, what, got.type == Type::kFloat32 ? "fp32" : "bf16", worst, largest,
              good ? "" : "  FAILED");
  failures += !good;
}

void check_linear(const Kernels& kernels, Type type, Type weight_type, std::int64_t m, std::int64_t n, std::int64_t k) {
  Buffer x(type, m * k), y(type, m * n, true), expected(type, m * n, true);
  std::vector<float> weight(n * k), bias(n);
  std::vector<std::uint8_t> scale(n * ((k + 31) / 32));
  for (auto& value : weight) value = uniform();
  for (auto& value : bias) value = uniform();
  for (auto& byte : scale) byte = static_cast<std::uint8_t>(125 + next() % 5);
  if (weight_type == Type::kMXFP8) {  // any byte but NaN
    auto* bytes = reinterpret_cast<std::uint8_t*>(weight.data());
    for (std::int64_t i = 0; i < n * k; ++i) bytes[i] = static_cast<std::uint8_t>((next() >> 24) % 0x7F | (next() >> 24 & 0x80));
  } else if (weight_type != Type::kFloat32) {  // small exponents in either 16-bit type
    auto* halves = reinterpret_cast<std::uint16_t*>(weight.data());
    for (std::int64_t i = 0; i < n * k; ++i) halves[i] = static_cast<std::uint16_t>((next() >> 16 & 0x83FF) | 0x3800);
  }
  LinearArgs args{x.data(), type, weight.data(), weight_type, scale.data(), bias.data(), y.data(), m, n, k, 1};
  kernels.linear(args);
  args.y = expected.data();
  kScalarKernels.linear(args);
  char what[64];
  std::snprintf(what, sizeof what, "linear %d of %dx%dx%d", static_cast<int>(weight_type), int(m), int(n), int(k));
  compare(kernels.name, what, y, expected);
}

void check_attention(const Kernels& kernels, Type type, std::int64_t head_dim, std::int64_t block_size, std::int64_t window) {
  const std::int32_t query_start[] = {0, 1, 21}, context_lens[] = {300, 50};
  const std::int64_t blocks = (300 + block_size - 1) / block_size, heads = 6, kv_heads = 2;
  std::vector<std::int32_t> table(2 * blocks);
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<std::int32_t>(table.size() - 1 - i);
  const std::int64_t cache = 2 * blocks * block_size * kv_heads * head_dim, tokens = 21;
  Buffer query(type, tokens * heads * head_dim), keys(type, cache), values(type, cache);
  Buffer out(type, tokens * heads * head_dim, true), expected(type, tokens * heads * head_dim, true);
  AttentionArgs args{query.data(), heads * head_dim, keys.data(), values.data(), out.data(), type, table.data(), query_start,
                     context_lens, 2, blocks, block_size, heads, kv_heads, head_dim, 0.5f, window, 1};
  kernels.attention(args);
  args.out = expected.data();
  kScalarKernels.attention(args);
  compare(kernels.name, "attention", out, expected);
}

void check_fused(const Kernels& kernels, Type type) {
  constexpr std::int64_t kRows = 3, kWidth = 77, kHeads = 2, kHeadDim = 25, kRotary = 18;
  Buffer x(type, kRows * 2 * kWidth), residual(type, kRows * kWidth), same(residual), weight(Type::kBFloat16, kWidth);
  Buffer out(type, kRows * kWidth, true), expected(type, kRows * kWidth, true);
  NormArgs norm{x.data(), residual.data(), weight.data(), out.data(), type, Type::kBFloat16, kRows, kWidth, 1e-5f, 1};
  kernels.norm(norm);
  norm.residual = same.data(), norm.out = expected.data();
  kScalarKernels.norm(norm);
  compare(kernels.name, "norm", out, expected);
  compare(kernels.name, "norm's sum", residual, same);

  SiluArgs silu{x.data(), out.data(), type, kRows, kWidth, 1};
  kernels.silu_and_mul(silu);
  silu.out = expected.data();
  kScalarKernels.silu_and_mul(silu);
  compare(kernels.name, "silu", out, expected);

  Buffer query(type, kRows * kHeads * kHeadDim), key(type, kRows * kHeads * kHeadDim), same_query(query), same_key(key);
  Buffer cos_sin(Type::kFloat32, 10 * kRotary);
  const std::int64_t positions[] = {9, 0, 4};
  RotaryArgs rotary{query.data(), kHeads * kHeadDim, kHeads, key.data(), kHeads * kHeadDim, kHeads, type,
                    cos_sin.wide.data(), positions, kRows, kHeadDim, kRotary, 1};
  kernels.rotary(rotary);
  rotary.query = same_query.data(), rotary.key = same_key.data();
  kScalarKernels.rotary(rotary);
  compare(kernels.name, "rotary", query, same_query);
  compare(kernels.name, "rotary", key, same_key);
}

}  // namespace

int main() {
#if defined(__aarch64__)
  const Kernels* sets[] = {&kNeonKernels};
#else
  const Kernels* sets[] = {&kScalarKernels};
#endif
  for (const Kernels* kernels : sets) {
    for (Type type : {Type::kFloat32, Type::kBFloat16}) {
      for (Type weight : {Type::kFloat32, Type::kBFloat16, Type::kFloat16, Type::kMXFP8}) {
        for (std::int64_t m : {1, 2, 3, 4, 5, 17}) {
          for (std::int64_t k : {1, 33, 576}) check_linear(*kernels, type, weight, m, 37, k);
        }
      }
      check_attention(*kernels, type, 64, 16, 0);
      check_attention(*kernels, type, 13, 5, 7);
      check_fused(*kernels, type);
    }
  }
  std::printf(failures == 0 ? "all equal\n" : "%d comparisons failed\n", failures);
  return failures == 0 ? 0 : 1;
}
