// y = x Wᵀ + b for weights in MXFP8, bf16, fp16 or fp32.
//
// Both operands are contiguous along K, so every product here is a dot product: vectors run along K, and a sum over lanes comes
// last. Nothing has to be transposed or repacked; the weight stays as it was loaded.
//
// Few tokens (decode). `dot_rows` streams the weight once and decodes it in registers: four rows at a time, 32 elements at a
// step. The elements of a block are multiplied and summed without their scale, which then multiplies the block's partial sum.
// Memory bounds it: 33/32 bytes an element.
//
// Many tokens (prefill). A task takes a panel of rows and a run of tokens, decodes the panel to fp32 (or to bf16, exactly, where
// the machine multiplies bf16 pairs and the activations are bf16), which then stays in the L2 cache, and multiplies with
// `gemm_tile`: four rows by kGemmTokens tokens of accumulators in registers. The multipliers bound it; decoding is under a
// twentieth.
//
// Each element of y is summed by one task in one order, so it depends neither on the number of threads nor on the run.
#pragma once

#include "vec_common.h"

namespace eightfold {
namespace {

constexpr int kRows = 4;                     // rows whose sums are formed together
constexpr std::int64_t kDotTokens = 4;       // up to here decode in registers
constexpr std::int64_t kChunk = 2048;        // elements of K that a panel holds
constexpr std::int64_t kPanelRows = 32;      // rows of a panel: 256 KiB at most
constexpr std::int64_t kTileTokens = 128;    // tokens of a task of the large product
constexpr std::int64_t kBatchTokens = 512;   // tokens whose inputs are converted at a time
constexpr std::int64_t kSerial = 1 << 15;    // below this many multiplications another thread does not pay

// A weight as the kernels see it.
template <class W>
struct Weight {
  const W* data;
  const std::uint8_t* scale;
  std::int64_t k, blocks;
};

template <class W>
constexpr bool kScaled = std::is_same<W, e4m3>::value;
// What a sum over raw elements has to be multiplied with.
template <class W>
constexpr float kUnit = kScaled<W> ? kE4M3Unit : 1.0f;

inline void decode_block(const e4m3* from, float scale, float* out) {
  // Two factors, because the unit times the largest scale would overflow.
  for (int i = 0; i < kBlock; i += kLanes) store(out + i, mul(mul(load(from + i), splat(kE4M3Unit)), splat(scale)));
}

// The scales of rows `begin` .. `end`, which lie side by side, as fp32.
inline const float* task_scales(const Weight<e4m3>& weight, std::int64_t begin, std::int64_t end) {
  const std::int64_t count = (end - begin) * weight.blocks;
  auto* scales = static_cast<float*>(thread_scratch(kPanelSlot, (count + kLanes) * sizeof(float)));
  convert_scales(weight.scale + begin * weight.blocks, count, scales);
  return scales;
}

// acc[t] += the sum over 32 elements of one row times token t, a scaled row's without its unit.
template <int T, class W>
inline void dot_block(const W* w, const float* scale, const float* x, std::int64_t x_stride, Vec (&acc)[T]) {
  Vec partial[T];
  for (int t = 0; t < T; ++t) partial[t] = splat(0.0f);
  // A page ahead. The processor's own prefetching stops at each page's end, and decoding leaves it too little time to restart;
  // wider elements, which need no decoding, are faster without.
  if constexpr (kScaled<W>) prefetch(w, 4096);
  for (int v = 0; v < kBlock; v += kLanes) {
    const Vec weight = load(w + v);
    for (int t = 0; t < T; ++t) {
      const Vec input = load(x + t * x_stride + v);
      partial[t] = fma(weight, input, partial[t]);
    }
  }
  for (int t = 0; t < T; ++t) {
    if constexpr (kScaled<W>) {
      acc[t] = fma(partial[t], splat(*scale), acc[t]);
    } else {
      acc[t] = add(partial[t], acc[t]);
    }
  }
}

// Elements start .. start + span of a row at their value, zero past K. `start` and `span` are multiples of 32.
template <class W, class E>
inline void decode_row(const Weight<W>& weight, std::int64_t row, std::int64_t start, std::int64_t span, E* out) {
  const W* from = weight.data + row * weight.k + start;
  const std::int64_t count = at_most(span, weight.k - start), whole = count / kBlock * kBlock;
  if constexpr (kScaled<W>) {
    float scales[kChunk / kBlock + kLanes];
    convert_scales(weight.scale + row * weight.blocks + start / kBlock, span / kBlock, scales);
    for (std::int64_t i = 0; i < whole; i += kBlock) decode_block(from + i, scales[i / kBlock], out + i);
    if (whole < count) {
      W tail[kBlock] = {};
      std::memcpy(tail, from + whole, count - whole);
      decode_block(tail, scales[whole / kBlock], out + whole);
    }
  } else {
    convert_row(from, count, out);
    std::memset(out + count, 0, (span - count) * sizeof(E));
  }
}

template <class X, class W>
struct DotContext {
  const LinearArgs* args;
  Weight<W> weight;
  const float* x;  // [m, k_padded], zero past K
  std::int64_t k_padded, rows_per_task;
};

// acc[t] = the lanes of the sum over K of one row times token t.
template <int T, class W>
inline void dot_row(const W* w, const float* scales, const float* x, std::int64_t k, std::int64_t k_padded, Vec (&acc)[T]) {
  for (int t = 0; t < T; ++t) acc[t] = splat(0.0f);
  std::int64_t i = 0;
  for (; i + kBlock <= k; i += kBlock) dot_block<T>(w + i, scales + i / kBlock, x + i, k_padded, acc);
  if (i < k) {  // a last, shorter block: a copy that ends in zeros
    W tail[kBlock] = {};
    std::memcpy(tail, w + i, (k - i) * sizeof(W));
    dot_block<T>(tail, scales + i / kBlock, x + i, k_padded, acc);
  }
}

template <class X, class W>
inline void write_sum(const DotContext<X, W>& c, std::int64_t row, int t, float sum) {
  const float bias = c.args->bias == nullptr ? 0.0f : c.args->bias[row];
  to_type(static_cast<X*>(c.args->y) + t * c.args->n + row, sum * kUnit<W> + bias);
}

template <int T, class X, class W>
void dot_task(void* context, std::int64_t index) {
  const auto& c = *static_cast<const DotContext<X, W>*>(context);
  const Weight<W>& weight = c.weight;
  std::int64_t row = index * c.rows_per_task;
  const std::int64_t end = at_most(row + c.rows_per_task, c.args->n);
  const float* scales = nullptr;
  if constexpr (kScaled<W>) scales = task_scales(weight, row, end);
  Vec acc[kRows][T];
  for (; row + kRows <= end; row += kRows) {
    for (int r = 0; r < kRows; ++r) {
      dot_row<T>(weight.data + (row + r) * weight.k, scales, c.x, weight.k, c.k_padded, acc[r]);
      if constexpr (kScaled<W>) scales += weight.blocks;
    }
    for (int t = 0; t < T; ++t) {
      float sums[kRows];
      store4(sums, sum4(acc[0][t], acc[1][t], acc[2][t], acc[3][t]));
      for (int r = 0; r < kRows; ++r) write_sum(c, row + r, t, sums[r]);
    }
  }
  for (; row < end; ++row) {
    dot_row<T>(weight.data + row * weight.k, scales, c.x, weight.k, c.k_padded, acc[0]);
    if constexpr (kScaled<W>) scales += weight.blocks;
    for (int t = 0; t < T; ++t) write_sum(c, row, t, sum(acc[0][t]));
  }
}

template <class X, class W>
void linear_dot(const LinearArgs& args, const Weight<W>& weight) {
  DotContext<X, W> context{&args, weight, nullptr, round_up(args.k, kBlock), 0};
  context.x = padded_rows<float>(static_cast<const X*>(args.x), args.m, args.k, context.k_padded);
  const int threads = args.m * args.n * args.k < kSerial ? 1 : args.threads;
  // Four tasks a thread, so that a core which others disturb gets fewer, of 32 to 256 KiB: memory is fastest on long runs.
  const std::int64_t row_bytes = args.k * sizeof(W);
  const std::int64_t bytes = at_least(1 << 15, at_most(1 << 18, args.n * row_bytes / (4 * threads)));
  context.rows_per_task = round_up(at_least(1, bytes / row_bytes), kRows);
  const std::int64_t tasks = (args.n + context.rows_per_task - 1) / context.rows_per_task;
  constexpr Task run[] = {dot_task<1, X, W>, dot_task<2, X, W>, dot_task<3, X, W>, dot_task<4, X, W>};
  static_assert(sizeof run / sizeof run[0] == kDotTokens, "a task for each number of tokens");
  parallel_for(tasks, threads, run[args.m - 1], &context);
}

// acc[t * kPanelRows + r] += sum over `k` elements of panel row r (of four) times token t (of T).
template <int T, class E>
inline void gemm_tile(const E* panel, std::int64_t panel_stride, const E* x, std::int64_t x_stride, std::int64_t k, float* acc) {
  constexpr int kStep = sizeof(Vec) / sizeof(E);
  Vec sums[kRows][T];
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < T; ++t) sums[r][t] = splat(0.0f);
  for (std::int64_t i = 0; i < k; i += kStep) {
    decltype(load_operand(x)) input[T];
    for (int t = 0; t < T; ++t) input[t] = load_operand(x + t * x_stride + i);
    for (int r = 0; r < kRows; ++r) {
      const auto weight = load_operand(panel + r * panel_stride + i);
      for (int t = 0; t < T; ++t) sums[r][t] = fma(weight, input[t], sums[r][t]);
    }
  }
  for (int t = 0; t < T; ++t) add_to(acc + t * kPanelRows, sum4(sums[0][t], sums[1][t], sums[2][t], sums[3][t]));
}

template <class E, int T = kGemmTokens>
inline void gemm_tokens(std::int64_t tokens, const E* panel, std::int64_t panel_stride, const E* x, std::int64_t x_stride,
                        std::int64_t k, float* acc) {
  if (tokens >= T) return gemm_tile<T>(panel, panel_stride, x, x_stride, k, acc);
  if constexpr (T > 1) gemm_tokens<E, T - 1>(tokens, panel, panel_stride, x, x_stride, k, acc);
}

template <class X, class W, class E>
struct GemmContext {
  const LinearArgs* args;
  Weight<W> weight;
  const E* x;  // [tokens, k_padded], of this batch
  std::int64_t k_padded, first_token, tokens, panels;
};

template <class X, class W, class E>
void gemm_task(void* context, std::int64_t index) {
  const auto& c = *static_cast<const GemmContext<X, W, E>*>(context);
  const std::int64_t row = index % c.panels * kPanelRows, rows = at_most(kPanelRows, c.args->n - row);
  const std::int64_t token = index / c.panels * kTileTokens, tokens = at_most(kTileTokens, c.tokens - token);
  const std::int64_t stride = at_most(kChunk, c.k_padded);
  auto* panel = static_cast<E*>(thread_scratch(kPanelSlot, kPanelRows * stride * sizeof(E)));
  float acc[kTileTokens * kPanelRows];
  std::memset(acc, 0, tokens * kPanelRows * sizeof(float));
  const std::int64_t used = round_up(rows, kRows);
  for (std::int64_t start = 0; start < c.k_padded; start += kChunk) {
    const std::int64_t span = at_most(kChunk, c.k_padded - start);
    for (std::int64_t r = 0; r < used; ++r) {
      if (r < rows) {
        decode_row(c.weight, row + r, start, span, panel + r * stride);
      } else {
        std::memset(panel + r * stride, 0, span * sizeof(E));
      }
    }
    for (std::int64_t t = 0; t < tokens; t += kGemmTokens) {
      for (std::int64_t r = 0; r < used; r += kRows) {
        gemm_tokens<E>(tokens - t, panel + r * stride, stride, c.x + (token + t) * c.k_padded + start, c.k_padded, span,
                       acc + t * kPanelRows + r);
      }
    }
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    X* out = static_cast<X*>(c.args->y) + (c.first_token + token + t) * c.args->n + row;
    for (std::int64_t r = 0; r < rows; ++r) {
      to_type(out + r, acc[t * kPanelRows + r] + (c.args->bias == nullptr ? 0.0f : c.args->bias[row + r]));
    }
  }
}

// E is the type in which the multipliers take both operands.
template <class X, class W, class E>
void linear_gemm(const LinearArgs& args, const Weight<W>& weight) {
  GemmContext<X, W, E> context{&args, weight, nullptr, round_up(args.k, kBlock), 0, 0, (args.n + kPanelRows - 1) / kPanelRows};
  for (; context.first_token < args.m; context.first_token += kBatchTokens) {
    context.tokens = at_most(kBatchTokens, args.m - context.first_token);
    context.x = padded_rows<E>(static_cast<const X*>(args.x) + context.first_token * args.k, context.tokens, args.k,
                               context.k_padded);
    const std::int64_t tiles = (context.tokens + kTileTokens - 1) / kTileTokens;
    parallel_for(context.panels * tiles, args.threads, gemm_task<X, W, E>, &context);
  }
}

template <class X, class W>
void linear_typed(const LinearArgs& args) {
  const Weight<W> weight{static_cast<const W*>(args.w), args.scale, args.k, (args.k + kBlock - 1) / kBlock};
  if (args.m <= kDotTokens) return linear_dot<X>(args, weight);
#if defined(EIGHTFOLD_DOT_BF16)
  if constexpr (std::is_same<X, bf16>::value && (kScaled<W> || std::is_same<W, bf16>::value)) {
    return linear_gemm<X, W, bf16>(args, weight);
  }
#endif
  linear_gemm<X, W, float>(args, weight);
}

template <class X>
void linear_of(const LinearArgs& args) {
  switch (args.w_type) {
    case Type::kFloat32: return linear_typed<X, float>(args);
    case Type::kBFloat16: return linear_typed<X, bf16>(args);
    case Type::kFloat16: return linear_typed<X, fp16>(args);
    case Type::kMXFP8: return linear_typed<X, e4m3>(args);
  }
}

void linear(const LinearArgs& args) {
  if (args.m == 0 || args.n == 0) return;
  args.x_type == Type::kBFloat16 ? linear_of<bf16>(args) : linear_of<float>(args);
}

}  // namespace
}  // namespace eightfold
