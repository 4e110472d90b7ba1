// The small operations between the products: one pass over memory, fp32 inside. At a few hundred elements a token each costs less
// than waking a thread, so they spread over threads only for many tokens.
#pragma once

#include "vec_common.h"

namespace eightfold {
namespace {

constexpr std::int64_t kFusedElements = 1 << 14;  // elements of one task

template <class Args>
struct RowsContext {
  const Args* args;
  std::int64_t rows_per_task, rows;
  void (*row)(const Args&, std::int64_t);
};

template <class Args>
void rows_task(void* context, std::int64_t index) {
  const auto& c = *static_cast<const RowsContext<Args>*>(context);
  const std::int64_t end = at_most((index + 1) * c.rows_per_task, c.rows);
  for (std::int64_t r = index * c.rows_per_task; r < end; ++r) c.row(*c.args, r);
}

template <class Args>
void for_rows(const Args& args, std::int64_t rows, std::int64_t width, void (*row)(const Args&, std::int64_t)) {
  RowsContext<Args> context{&args, kFusedElements / at_most(kFusedElements, width), rows, row};
  parallel_for((rows + context.rows_per_task - 1) / context.rows_per_task, args.threads, rows_task<Args>, &context);
}

// The sum is rounded to the activation's type before it is normed, as if two operations had passed it in memory.
template <class X, class W>
void norm_row(const NormArgs& args, std::int64_t row) {
  const X* x = static_cast<const X*>(args.x) + row * args.width;
  const W* weight = static_cast<const W*>(args.weight);
  X* out = static_cast<X*>(args.out) + row * args.width;
  if (args.residual != nullptr) {
    X* residual = static_cast<X*>(args.residual) + row * args.width;
    for (std::int64_t i = 0; i < args.width; i += kLanes) {
      const std::int64_t count = args.width - i;
      store_part(residual + i, add(load_part(residual + i, count), load_part(x + i, count)), count);
    }
    x = residual;
  }
  Vec squares = splat(0.0f);
  for (std::int64_t i = 0; i < args.width; i += kLanes) {
    const Vec value = load_part(x + i, args.width - i);
    squares = fma(value, value, squares);
  }
  const Vec factor = splat(1.0f / ::sqrtf(sum(squares) / static_cast<float>(args.width) + args.eps));
  for (std::int64_t i = 0; i < args.width; i += kLanes) {
    const std::int64_t count = args.width - i;
    store_part(out + i, mul(mul(load_part(x + i, count), factor), load_part(weight + i, count)), count);
  }
}

template <class X>
auto norm_row_of(Type weight_type) {
  switch (weight_type) {
    case Type::kFloat32:
      return norm_row<X, float>;
    case Type::kFloat16:
      return norm_row<X, fp16>;
    default:
      return norm_row<X, bf16>;
  }
}

void norm(const NormArgs& args) {
  for_rows(args, args.rows, args.width,
           args.type == Type::kBFloat16 ? norm_row_of<bf16>(args.weight_type) : norm_row_of<float>(args.weight_type));
}

template <class X>
void rotate(X* data, std::int64_t heads, std::int64_t head_dim, const float* cosines, std::int64_t half) {
  const float* sines = cosines + half;
  for (std::int64_t h = 0; h < heads; ++h, data += head_dim) {
    for (std::int64_t i = 0; i < half; i += kLanes) {
      const std::int64_t count = half - i;
      const Vec cosine = load_part(cosines + i, count), sine = load_part(sines + i, count);
      const Vec first = load_part(data + i, count), second = load_part(data + half + i, count);
      store_part(data + i, sub(mul(first, cosine), mul(second, sine)), count);
      store_part(data + half + i, add(mul(second, cosine), mul(first, sine)), count);
    }
  }
}

template <class X>
void rotary_row(const RotaryArgs& args, std::int64_t token) {
  const float* cosines = args.cos_sin + args.positions[token] * args.rotary_dim;
  const std::int64_t half = args.rotary_dim / 2;
  rotate(static_cast<X*>(args.query) + token * args.query_stride, args.query_heads, args.head_dim, cosines, half);
  rotate(static_cast<X*>(args.key) + token * args.key_stride, args.key_heads, args.head_dim, cosines, half);
}

void rotary(const RotaryArgs& args) {
  const std::int64_t width = (args.query_heads + args.key_heads) * args.head_dim;
  for_rows(args, args.tokens, width, args.type == Type::kBFloat16 ? rotary_row<bf16> : rotary_row<float>);
}

template <class X>
void silu_row(const SiluArgs& args, std::int64_t row) {
  const X* gate = static_cast<const X*>(args.x) + row * 2 * args.width;
  const X* up = gate + args.width;
  X* out = static_cast<X*>(args.out) + row * args.width;
  for (std::int64_t i = 0; i < args.width; i += kLanes) {
    const std::int64_t count = args.width - i;
    const Vec value = load_part(gate + i, count);
    const Vec silu = div(value, add(splat(1.0f), exponential(sub(splat(0.0f), value))));
    store_part(out + i, mul(silu, load_part(up + i, count)), count);
  }
}

void silu_and_mul(const SiluArgs& args) {
  for_rows(args, args.rows, args.width, args.type == Type::kBFloat16 ? silu_row<bf16> : silu_row<float>);
}

}  // namespace
}  // namespace eightfold
