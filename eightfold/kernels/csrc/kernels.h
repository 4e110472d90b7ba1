// What an instruction set offers: one table of functions, filled by each isa_*.cpp from the same templates.
//
// The templates (linear.h, attention.h, fused.h) are written once over the few vector operations of vec_*.h, and each
// isa_*.cpp compiles them for its own instruction set. module.cpp picks a table at run time, so that one wheel serves every
// machine of an architecture. Everything in an isa_*.cpp but its table has internal linkage: if the linker merged an inline
// function of two of them, a machine without AVX-512 could be handed the AVX-512 copy.
#pragma once

#include <cstdint>

#include "types.h"

namespace eightfold {

// y[m, n] = sum_k x[m, k] * w[n, k] + bias[n]. x and y share a type; rows are contiguous.
struct LinearArgs {
  const void* x;
  Type x_type;
  const void* w;
  Type w_type;
  const std::uint8_t* scale;  // E8M0 [n, ceil(k / 32)], for MXFP8 only
  const float* bias;          // [n] or null
  void* y;
  std::int64_t m, n, k;
  int threads;
};

// Paged attention; the tensors are those of AttentionBackend.run in registry.py.
struct AttentionArgs {
  const void* query;          // [num_tokens, num_heads, head_dim]
  std::int64_t query_stride;  // elements from one token to the next
  const void* key_cache;      // [num_blocks, block_size, num_kv_heads, head_dim]
  const void* value_cache;    // like key_cache
  void* out;                  // [num_tokens, num_heads, head_dim]
  Type type;                  // of the four
  const std::int32_t* block_tables;  // [num_seqs, max_blocks]
  const std::int32_t* query_start;   // [num_seqs + 1]
  const std::int32_t* context_lens;  // [num_seqs]
  std::int64_t num_seqs, max_blocks, block_size;
  std::int64_t num_heads, num_kv_heads, head_dim;
  float scale;
  std::int64_t window;  // keys that a query sees; 0 is all of them
  int threads;
};

struct NormArgs {
  const void* x;   // [rows, width]
  void* residual;  // null, or [rows, width]: becomes residual + x, and that sum is normed
  const void* weight;
  void* out;
  Type type, weight_type;
  std::int64_t rows, width;
  float eps;
  int threads;
};

// Rotates the first rotary_dim elements of each head in place.
struct RotaryArgs {
  void* query;  // [tokens, query_heads, head_dim]; a stride is in elements, from one token to the next
  std::int64_t query_stride, query_heads;
  void* key;  // [tokens, key_heads, head_dim]
  std::int64_t key_stride, key_heads;
  Type type;
  const float* cos_sin;           // [max_position, rotary_dim]: cosines, then sines
  const std::int64_t* positions;  // [tokens]
  std::int64_t tokens, head_dim, rotary_dim;
  int threads;
};

struct SiluArgs {
  const void* x;  // [rows, 2 * width]
  void* out;      // [rows, width]
  Type type;
  std::int64_t rows, width;
  int threads;
};

// Copies rows of `bytes` bytes to their slots. The same for every instruction set.
struct WriteArgs {
  const void* key;  // [tokens, ...]; a stride is in bytes
  std::int64_t key_stride;
  const void* value;
  std::int64_t value_stride;
  void* key_cache;  // [slots, bytes]
  void* value_cache;
  const std::int64_t* slots;  // [tokens]
  std::int64_t tokens, bytes;
};

struct Kernels {
  const char* name;
  void (*linear)(const LinearArgs&);
  void (*attention)(const AttentionArgs&);
  void (*norm)(const NormArgs&);
  void (*rotary)(const RotaryArgs&);
  void (*silu_and_mul)(const SiluArgs&);
};

extern const Kernels kScalarKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;        // AVX2, FMA, F16C
extern const Kernels kAvx512Kernels;      // AVX-512 F, BW, DQ, VL
extern const Kernels kAvx512Bf16Kernels;  // the same, with VBMI and BF16
#elif defined(__aarch64__)
extern const Kernels kNeonKernels;
#endif

}  // namespace eightfold
