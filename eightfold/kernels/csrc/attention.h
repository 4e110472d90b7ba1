// Causal attention over the paged cache, grouped heads, all sums in fp32.
//
// A task takes one key head and a tile of queries: up to kTileRows rows, a row being one query token under one of the heads that
// share the key head. It walks the context in panels of 32 keys, gathered from their blocks: scores by the same `gemm_tile` as
// the dense product, a softmax whose maximum and sum are carried along (each panel rescales what came before), and the weighted
// sum of the values. Keys and values are read where they lie if the multipliers take them so, else converted into a panel first.
//
// A sequence that brings a single tile, which is every one that decodes, has too few tasks to fill the machine over a long
// context: its context is cut into parts of kPartKeys keys, each with a maximum and a sum of its own, which a second pass joins
// in order. Where the cuts lie depends on the context alone, so that the number of threads changes no result.
//
// Bounds: bytes of keys and values in decode, the multipliers in prefill.
#pragma once

#include "linear.h"

namespace eightfold {
namespace {

constexpr std::int64_t kTileRows = 48;
constexpr std::int64_t kPartKeys = 256;
static_assert(kPartKeys % kPanelRows == 0, "parts end where panels end");

struct Item {
  std::int64_t seq, kv_head, first, tokens;  // tokens of the tile, counted from the start of the chunk
  std::int64_t key_begin, key_end;
  float* partial;  // null where the item is the whole context; else [rows, head_dim] sums, then [rows] maxima, [rows] sums
};

struct AttentionContext {
  const AttentionArgs* args;
  std::int64_t group, tile_tokens, head_padded;
  Item* items;
  std::int64_t count;
};

template <class E>
struct Panel {
  E* query;        // [rows, head_padded]
  E* keys;         // [kPanelRows, head_padded]
  float* values;   // [kPanelRows, head_padded]
  float* scores;   // [rows, kPanelRows]
  float* sums;     // [rows, head_padded]
  float* maximum;  // [rows]
  float* total;    // [rows]
  float* rescale;  // [rows]
};

template <class E>
Panel<E> make_panel(std::int64_t rows, std::int64_t head_padded) {
  const std::int64_t floats = kPanelRows * head_padded + rows * (kPanelRows + head_padded) + 3 * rows;
  const std::int64_t operands = (rows + kPanelRows) * head_padded;
  auto* memory = static_cast<float*>(thread_scratch(kPanelSlot, floats * sizeof(float) + operands * sizeof(E)));
  Panel<E> panel;
  panel.values = memory;
  panel.sums = panel.values + kPanelRows * head_padded;
  panel.scores = panel.sums + rows * head_padded;
  panel.maximum = panel.scores + rows * kPanelRows;
  panel.total = panel.maximum + rows;
  panel.rescale = panel.total + rows;
  panel.query = reinterpret_cast<E*>(panel.rescale + rows);
  panel.keys = panel.query + rows * head_padded;
  std::memset(panel.sums, 0, rows * head_padded * sizeof(float));
  for (std::int64_t r = 0; r < rows; ++r) {
    panel.maximum[r] = -INFINITY;
    panel.total[r] = 0.0f;
  }
  return panel;
}

template <class E, class X>
inline void gather_row(const X* from, std::int64_t width, std::int64_t padded, E* to) {
  convert_row(from, width, to);
  if (width < padded) std::memset(to + width, 0, (padded - width) * sizeof(E));
}

// Turns a row's scores into weights. Those outside low .. high - 1 are hidden and get the weight 0.
inline void softmax_row(float* scores, std::int64_t low, std::int64_t high, float scale, float& maximum, float& total,
                        float& rescale) {
  if (low >= high) {
    std::memset(scores, 0, kPanelRows * sizeof(float));
    rescale = 1.0f;
    return;
  }
  for (std::int64_t j = 0; j < low; ++j) scores[j] = -INFINITY;
  for (std::int64_t j = high; j < kPanelRows; ++j) scores[j] = -INFINITY;
  Vec largest = splat(-INFINITY);
  for (std::int64_t j = 0; j < kPanelRows; j += kLanes) {
    const Vec scaled = mul(load(scores + j), splat(scale));
    store(scores + j, scaled);
    largest = max(largest, scaled);
  }
  const float before = maximum, peak = max_lane(largest);
  maximum = peak > before ? peak : before;
  rescale = ::expf(before - maximum);
  Vec added = splat(0.0f);
  for (std::int64_t j = 0; j < kPanelRows; j += kLanes) {
    const Vec weight = exponential(sub(load(scores + j), splat(maximum)));
    store(scores + j, weight);
    added = add(added, weight);
  }
  total = total * rescale + sum(added);
}

// sums[r] = sums[r] * rescale[r] + weights[r] * values, for R rows and C vectors of the head, which start at element d.
template <int R, int C, class V>
inline void weigh_tile(const float* weights, const V* const* values, std::int64_t d, std::int64_t stride, std::int64_t keys,
                       const float* rescale, float* sums) {
  Vec acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = mul(load(sums + r * stride + d + c * kLanes), splat(rescale[r]));
  for (std::int64_t j = 0; j < keys; ++j) {
    Vec value[C];
    for (int c = 0; c < C; ++c) value[c] = load(values[j] + d + c * kLanes);
    for (int r = 0; r < R; ++r) {
      const Vec weight = splat(weights[r * kPanelRows + j]);
      for (int c = 0; c < C; ++c) acc[r][c] = fma(weight, value[c], acc[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(sums + r * stride + d + c * kLanes, acc[r][c]);
}

template <int R, class E, class V>
inline void weigh_rows(const Panel<E>& p, const V* const* values, std::int64_t row, std::int64_t stride, std::int64_t keys) {
  const float* weights = p.scores + row * kPanelRows;
  float* sums = p.sums + row * stride;
  std::int64_t d = 0;
  for (; d + 4 * kLanes <= stride; d += 4 * kLanes) {
    weigh_tile<R, 4>(weights, values, d, stride, keys, p.rescale + row, sums);
  }
  for (; d < stride; d += kLanes) weigh_tile<R, 1>(weights, values, d, stride, keys, p.rescale + row, sums);
}

template <class E, class V>
inline void weigh(const Panel<E>& p, const V* const* values, std::int64_t rows, std::int64_t stride, std::int64_t keys) {
  std::int64_t r = 0;
  for (; r + 3 <= rows; r += 3) weigh_rows<3>(p, values, r, stride, keys);
  for (; r < rows; ++r) weigh_rows<1>(p, values, r, stride, keys);
}

template <class X, class E>
void attention_task(void* context, std::int64_t index) {
  const auto& c = *static_cast<const AttentionContext*>(context);
  const AttentionArgs& args = *c.args;
  const Item& item = c.items[index];
  const std::int64_t rows = item.tokens * c.group, stride = c.head_padded, head_dim = args.head_dim;
  const std::int64_t chunk = args.query_start[item.seq], chunk_tokens = args.query_start[item.seq + 1] - chunk;
  const std::int64_t first_position = args.context_lens[item.seq] - chunk_tokens + item.first;
  const std::int64_t first_head = item.kv_head * c.group;
  const Panel<E> p = make_panel<E>(rows, stride);
  for (std::int64_t r = 0; r < rows; ++r) {
    const X* query = static_cast<const X*>(args.query) + (chunk + item.first + r / c.group) * args.query_stride;
    gather_row(query + (first_head + r % c.group) * head_dim, head_dim, stride, p.query + r * stride);
  }
  const std::int32_t* table = args.block_tables + item.seq * args.max_blocks;
  // Rows of the caches serve as they are where no padding is needed; keys in the multipliers' type, and four to a block, because
  // gemm_tile takes four at one distance. Values in bf16 are worth converting once where many rows use them.
  const bool whole_head = head_dim == stride;
  const bool keys_in_place = std::is_same<E, X>::value && whole_head && args.block_size % kRows == 0;
  const bool values_in_place = whole_head && (std::is_same<X, float>::value || rows < 8);
  const std::int64_t row_stride = args.num_kv_heads * head_dim;
  for (std::int64_t key = item.key_begin; key < item.key_end; key += kPanelRows) {
    const std::int64_t keys = at_most(kPanelRows, item.key_end - key), used = round_up(keys, kRows);
    const X* key_rows[kPanelRows];
    const X* value_rows[kPanelRows];
    std::int64_t block = key / args.block_size, offset = key % args.block_size;
    for (std::int64_t j = 0; j < keys; ++j) {
      const std::int64_t at = (table[block] * args.block_size + offset) * row_stride + item.kv_head * head_dim;
      key_rows[j] = static_cast<const X*>(args.key_cache) + at;
      value_rows[j] = static_cast<const X*>(args.value_cache) + at;
      if (++offset == args.block_size) ++block, offset = 0;
    }
    if (!keys_in_place) {
      for (std::int64_t j = 0; j < keys; ++j) gather_row(key_rows[j], head_dim, stride, p.keys + j * stride);
      std::memset(p.keys + keys * stride, 0, (used - keys) * stride * sizeof(E));
    }
    std::memset(p.scores, 0, rows * kPanelRows * sizeof(float));
    for (std::int64_t j = 0; j < used; j += kRows) {
      const E* four = keys_in_place ? reinterpret_cast<const E*>(key_rows[j]) : p.keys + j * stride;
      const std::int64_t distance = keys_in_place ? row_stride : stride;
      for (std::int64_t r = 0; r < rows; r += kGemmTokens) {
        gemm_tokens<E>(rows - r, four, distance, p.query + r * stride, stride, stride, p.scores + r * kPanelRows + j);
      }
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t position = first_position + r / c.group;
      const std::int64_t low = args.window == 0 || position - args.window < key ? 0 : position - args.window + 1 - key;
      softmax_row(p.scores + r * kPanelRows, low, at_most(keys, position + 1 - key), args.scale, p.maximum[r], p.total[r],
                  p.rescale[r]);
    }
    if (values_in_place) {
      weigh(p, value_rows, rows, stride, keys);
    } else {
      const float* converted[kPanelRows];
      for (std::int64_t j = 0; j < keys; ++j) {
        gather_row(value_rows[j], head_dim, stride, p.values + j * stride);
        converted[j] = p.values + j * stride;
      }
      weigh(p, converted, rows, stride, keys);
    }
  }
  if (item.partial == nullptr) {
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t token = chunk + item.first + r / c.group, head = first_head + r % c.group;
      write_scaled(p.sums + r * stride, 1.0f / p.total[r], head_dim,
                   static_cast<X*>(args.out) + (token * args.num_heads + head) * head_dim);
    }
  } else {
    std::memcpy(item.partial, p.sums, rows * stride * sizeof(float));
    std::memcpy(item.partial + rows * stride, p.maximum, rows * sizeof(float));
    std::memcpy(item.partial + rows * stride + rows, p.total, rows * sizeof(float));
  }
}

// Joins the parts of one key head's context into the first one's memory, and writes the result. `index` is any item's; only a
// first part has work.
template <class X>
void join_task(void* context, std::int64_t index) {
  const auto& c = *static_cast<const AttentionContext*>(context);
  const AttentionArgs& args = *c.args;
  const Item& item = c.items[index];
  if (item.partial == nullptr) return;
  const auto same = [&](std::int64_t i) { return c.items[i].seq == item.seq && c.items[i].kv_head == item.kv_head; };
  if (index > 0 && same(index - 1)) return;
  std::int64_t end = index + 1;
  while (end < c.count && same(end)) ++end;
  const std::int64_t rows = item.tokens * c.group, stride = c.head_padded;
  for (std::int64_t r = 0; r < rows; ++r) {
    float maximum = -INFINITY, total = 0.0f;
    for (std::int64_t i = index; i < end; ++i) {
      const float peak = c.items[i].partial[rows * stride + r];
      maximum = peak > maximum ? peak : maximum;
    }
    float* joined = item.partial + r * stride;
    for (std::int64_t i = index; i < end; ++i) {
      const float* partial = c.items[i].partial;
      const float weight = ::expf(partial[rows * stride + r] - maximum);
      total += weight * partial[rows * stride + rows + r];
      for (std::int64_t d = 0; d < stride; d += kLanes) {
        const Vec scaled = mul(load(partial + r * stride + d), splat(weight));
        store(joined + d, i == index ? scaled : add(load(joined + d), scaled));
      }
    }
    const std::int64_t token = args.query_start[item.seq] + item.first + r / c.group;
    const std::int64_t head = item.kv_head * c.group + r % c.group;
    write_scaled(joined, 1.0f / total, args.head_dim,
                 static_cast<X*>(args.out) + (token * args.num_heads + head) * args.head_dim);
  }
}

// Cuts the batch into items; only counts them where `items` is null. Returns the floats of partial results.
std::int64_t plan(AttentionContext& c, Item* items, float* partials) {
  const AttentionArgs& args = *c.args;
  std::int64_t floats = 0;
  c.count = 0;
  for (std::int64_t seq = 0; seq < args.num_seqs; ++seq) {
    const std::int64_t tokens = args.query_start[seq + 1] - args.query_start[seq];
    const std::int64_t start = args.context_lens[seq] - tokens;  // position of the chunk's first token
    for (std::int64_t kv_head = 0; kv_head < args.num_kv_heads; ++kv_head) {
      for (std::int64_t first = 0; first < tokens; first += c.tile_tokens) {
        const std::int64_t used = at_most(c.tile_tokens, tokens - first), key_end = start + first + used;
        const std::int64_t seen = args.window == 0 ? 0 : start + first - args.window + 1;
        const std::int64_t begin = seen > 0 ? seen / kPartKeys * kPartKeys : 0;
        const bool cut = tokens <= c.tile_tokens && key_end - begin > kPartKeys;
        for (std::int64_t key = begin; key < key_end; key += cut ? kPartKeys : key_end) {
          const std::int64_t end = cut ? at_most(key + kPartKeys, key_end) : key_end;
          const std::int64_t size = cut ? used * c.group * (c.head_padded + 2) : 0;
          if (items != nullptr) items[c.count] = {seq, kv_head, first, used, key, end, cut ? partials + floats : nullptr};
          ++c.count;
          floats += size;
        }
      }
    }
  }
  return floats;
}

template <class X, class E>
void attention_typed(const AttentionArgs& args) {
  AttentionContext context{&args, args.num_heads / args.num_kv_heads, 0, round_up(args.head_dim, kBlock), nullptr, 0};
  context.tile_tokens = kTileRows / at_most(kTileRows, context.group);
  const std::int64_t floats = plan(context, nullptr, nullptr);
  const std::int64_t item_bytes = context.count * sizeof(Item);
  auto* memory = static_cast<char*>(thread_scratch(kInputSlot, item_bytes + floats * sizeof(float)));
  context.items = reinterpret_cast<Item*>(memory);
  plan(context, context.items, reinterpret_cast<float*>(memory + item_bytes));
  parallel_for(context.count, args.threads, attention_task<X, E>, &context);
  if (floats > 0) parallel_for(context.count, args.threads, join_task<X>, &context);
}

void attention(const AttentionArgs& args) {
  if (args.type != Type::kBFloat16) return attention_typed<float, float>(args);
#if defined(EIGHTFOLD_DOT_BF16)
  attention_typed<bf16, bf16>(args);
#else
  attention_typed<bf16, float>(args);
#endif
}

}  // namespace
}  // namespace eightfold
