// The element types that tensors arrive in. They only name bits; vec_*.h turns them into fp32 vectors.
#pragma once

#include <cstdint>

namespace eightfold {

struct bf16 {
  std::uint16_t bits;
};
struct fp16 {
  std::uint16_t bits;
};
struct e4m3 {
  std::uint8_t bits;
};

// The numbers that native.py passes for a dtype.
enum class Type : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kMXFP8 = 3 };

constexpr int kBlock = 32;  // elements that share one scale

}  // namespace eightfold
