// One query tile against a range of keys of one KV head: online softmax over tiles of 64 keys.
//
// Each row sees a fixed sequence of operations that depends on its own position only: key tiles and
// splits start at multiples of their size, sums run over keys in ascending order, and rows that share
// a register tile never mix. So its bits do not depend on the other rows of the call.
#include <type_traits>

#include "lanes.h"
#include "tree_attention.h"

namespace fastspec::cpu::FASTSPEC_ISA::attention {

using namespace lanes;

constexpr int kTileRows = kMaxTileRows;
constexpr int kTileVectors = kRegisters == 32 ? 4 : 2;
constexpr int kKeyVectors = kKeyTile / kLanes;
constexpr float kLog2E = 1.44269504f;
constexpr float kMinusInfinity = -__builtin_inff();

// The keys of the current tile that one row sees: [first, last).
struct Visible {
  int64_t first, last;
};

template <typename T>
struct KeyTile {
  const T* keys[kKeyTile];
  const T* values[kKeyTile];
  int64_t size;
};

template <typename T>
static void locate(const AttentionCall& call, const QueryTile& tile, int64_t kv_head,
                   int64_t first_key, KeyTile<T>& to) {
  const int32_t* table = call.block_table + tile.sequence * call.table_stride;
  const int64_t head_offset = kv_head * call.head_size;
  int64_t block = first_key / call.block_size, slot = first_key % call.block_size;
  for (int64_t j = 0; j < to.size; ++j) {
    const int64_t offset = table[block] * call.block_stride + slot * call.slot_stride + head_offset;
    to.keys[j] = static_cast<const T*>(call.key_cache) + offset;
    to.values[j] = static_cast<const T*>(call.value_cache) + offset;
    if (++slot == call.block_size) {
      slot = 0;
      ++block;
    }
  }
  // Whole vectors are computed; the surplus lanes repeat a valid key and are masked afterwards.
  for (int64_t j = to.size; j % kLanes != 0; ++j) to.keys[j] = to.keys[to.size - 1];
}

template <typename T>
static void transpose_keys(const KeyTile<T>& tile, int64_t head_size, float* keys) {
  for (int64_t j = 0; j < tile.size; j += kLanes) {
    for (int64_t d = 0; d < head_size; d += kLanes) {
      const int64_t count = head_size - d < kLanes ? head_size - d : kLanes;
      Floats block[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        block[i] = count == kLanes ? load(tile.keys[j + i] + d) : load_partial(tile.keys[j + i] + d, count);
      }
      transpose(block);
      for (int i = 0; i < count; ++i) store(keys + (d + i) * kKeyTile + j, block[i]);
    }
  }
}

template <typename T>
static void copy_values(const KeyTile<T>& tile, int64_t head_size, float* values) {
  const int64_t whole = head_size / kLanes * kLanes;
  for (int64_t j = 0; j < tile.size; ++j) {
    float* to = values + j * padded(head_size);
    for (int64_t d = 0; d < whole; d += kLanes) store(to + d, load(tile.values[j] + d));
    for (int64_t d = whole; d < head_size; ++d) to[d] = to_float(tile.values[j][d]);
    for (int64_t d = head_size; d < padded(head_size); ++d) to[d] = 0.0f;
  }
}

// One register tile of rows reads float32 values in place; more rows, and other types, a dense copy.
template <typename T>
static void point_to_values(const KeyTile<T>& tile, int64_t head_size, int64_t num_rows,
                            float* copy, const float** values) {
  if constexpr (std::is_same_v<T, float>) {
    if (num_rows <= kTileRows && head_size % kRowPadding == 0) {
      for (int64_t j = 0; j < tile.size; ++j) values[j] = tile.values[j];
      return;
    }
  }
  copy_values(tile, head_size, copy);
  for (int64_t j = 0; j < tile.size; ++j) values[j] = copy + j * padded(head_size);
}

// scores[row][j] = sum over d of queries[row][d] * keys[d][j], for Vectors * kLanes keys.
template <int Rows, int Vectors>
static void multiply_keys(const float* queries, const float* keys, int64_t head_size,
                          float* scores) {
  Floats sum[Rows][Vectors] = {};
  for (int64_t d = 0; d < head_size; ++d) {
    Floats key[Vectors];
    for (int v = 0; v < Vectors; ++v) key[v] = load(keys + d * kKeyTile + v * kLanes);
    for (int r = 0; r < Rows; ++r) {
      const Floats query = broadcast(queries[r * head_size + d]);
      for (int v = 0; v < Vectors; ++v) sum[r][v] = multiply_add(query, key[v], sum[r][v]);
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) store(scores + r * kKeyTile + v * kLanes, sum[r][v]);
  }
}

// out[row][d] += sum over keys first..last of weights[row][j] * values[j][d], for Vectors * kLanes d.
template <int Rows, int Vectors>
static void multiply_values(const float* weights, const float* const* values, Visible keys,
                            int64_t first_dim, float* out, int64_t out_stride) {
  Floats sum[Rows][Vectors];
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) sum[r][v] = load(out + r * out_stride + first_dim + v * kLanes);
  }
  for (int64_t j = keys.first; j < keys.last; ++j) {
    Floats value[Vectors];
    for (int v = 0; v < Vectors; ++v) value[v] = load(values[j] + first_dim + v * kLanes);
    for (int r = 0; r < Rows; ++r) {
      const Floats weight = broadcast(weights[r * kKeyTile + j]);
      for (int v = 0; v < Vectors; ++v) sum[r][v] = multiply_add(weight, value[v], sum[r][v]);
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) store(out + r * out_stride + first_dim + v * kLanes, sum[r][v]);
  }
}

template <int Rows>
static void score_rows(const float* queries, const float* keys, int64_t num_keys, int64_t head_size,
                       float* scores) {
  int64_t vectors = (num_keys + kLanes - 1) / kLanes;
  for (; vectors >= kTileVectors; vectors -= kTileVectors) {
    multiply_keys<Rows, kTileVectors>(queries, keys, head_size, scores);
    keys += kTileVectors * kLanes;
    scores += kTileVectors * kLanes;
  }
  for (; vectors > 0; --vectors) {
    multiply_keys<Rows, 1>(queries, keys, head_size, scores);
    keys += kLanes;
    scores += kLanes;
  }
}

template <int Rows>
static void sum_rows(const float* weights, const float* const* values, Visible keys,
                     int64_t head_size, float* out) {
  const int64_t stride = padded(head_size);
  int64_t d = 0;
  for (; d + kTileVectors * kLanes <= stride; d += kTileVectors * kLanes) {
    multiply_values<Rows, kTileVectors>(weights, values, keys, d, out, stride);
  }
  for (; d < stride; d += kLanes) multiply_values<Rows, 1>(weights, values, keys, d, out, stride);
}

// Indexed by the number of rows - 1.
constexpr decltype(&score_rows<1>) kScoreRows[kTileRows] = {
    score_rows<1>, score_rows<2>, score_rows<3>, score_rows<4>, score_rows<5>, score_rows<6>};
constexpr decltype(&sum_rows<1>) kSumRows[kTileRows] = {sum_rows<1>, sum_rows<2>, sum_rows<3>,
                                                        sum_rows<4>, sum_rows<5>, sum_rows<6>};

// A polynomial near 0 keeps small scores accurate, where 1 - 2 / (e^2x + 1) would cancel.
static Floats tanh(Floats x) {
  const Floats magnitude = x < 0.0f ? -x : x;
  const Floats square = x * x;
  Floats y = broadcast(-6.0018082e-3f);
  y = multiply_add(y, square, broadcast(2.093143e-2f));
  y = multiply_add(y, square, broadcast(-5.383702e-2f));
  y = multiply_add(y, square, broadcast(1.3332678e-1f));
  y = multiply_add(y, square, broadcast(-3.3333328e-1f));
  const Floats small = multiply_add(y * square, x, x);
  const Floats bounded = magnitude > 20.0f ? broadcast(20.0f) : magnitude;
  const Floats large = 1.0f - 2.0f / (exp2(bounded * (2.0f * kLog2E)) + 1.0f);
  return magnitude < 0.64f ? small : (x < 0.0f ? -large : large);
}

// Turns scores into 2^(score - maximum), updates the row's state and rescales what it has summed.
static void soften(float* scores, Visible keys, float softcap, float& maximum, float* lane_sums,
                   float* value, int64_t value_size) {
  const int64_t begin = keys.first / kLanes, end = (keys.last + kLanes - 1) / kLanes;
  Ints lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  Floats score[kKeyVectors];
  Floats highest = broadcast(kMinusInfinity);
  for (int64_t v = begin; v < end; ++v) {
    Floats x = load(scores + v * kLanes);
    if (softcap > 0.0f) x = tanh(x) * (softcap * kLog2E);
    const Ints key = lane + static_cast<int32_t>(v * kLanes);
    const Ints seen = (key >= static_cast<int32_t>(keys.first)) & (key < static_cast<int32_t>(keys.last));
    score[v] = seen ? x : broadcast(kMinusInfinity);
    highest = highest < score[v] ? score[v] : highest;
  }
  const float tile_maximum = largest(highest);
  const float raised = maximum < tile_maximum ? tile_maximum : maximum;
  const float subtracted = raised == kMinusInfinity ? 0.0f : raised;
  const float decay = exp2(maximum - subtracted);
  Floats sum = load(lane_sums) * decay;
  for (int64_t v = begin; v < end; ++v) {
    const Floats weight = exp2(score[v] - subtracted);
    store(scores + v * kLanes, weight);
    sum += weight;
  }
  store(lane_sums, sum);
  maximum = raised;
  if (decay != 1.0f) {
    for (int64_t d = 0; d < value_size; d += kLanes) store(value + d, load(value + d) * decay);
  }
}

// Adds weights * values. Rows see ascending ranges: all share the middle, each has its own ends.
static void add_values(const float* weights, const float* const* values, const Visible* seen,
                       int64_t num_rows, int64_t head_size, float* out) {
  const int64_t stride = padded(head_size);
  const int64_t begin = seen[num_rows - 1].first;
  const int64_t end = begin < seen[0].last ? seen[0].last : begin;
  for (int64_t r = 0; r < num_rows; ++r) {
    const Visible head = {seen[r].first, begin < seen[r].last ? begin : seen[r].last};
    if (head.first < head.last) {
      sum_rows<1>(weights + r * kKeyTile, values, head, head_size, out + r * stride);
    }
  }
  if (begin < end) {
    kSumRows[num_rows - 1](weights, values, {begin, end}, head_size, out);
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    const Visible tail = {end > seen[r].first ? end : seen[r].first, seen[r].last};
    if (tail.first < tail.last) {
      sum_rows<1>(weights + r * kKeyTile, values, tail, head_size, out + r * stride);
    }
  }
}

static int64_t clip(int64_t x, int64_t limit) { return x < 0 ? 0 : (x < limit ? x : limit); }

// What the token at `position` sees of the tile of `size` keys from first_key on.
static Visible visible(const AttentionCall& call, int64_t position, int64_t first_key, int64_t size) {
  const int64_t last = position + 1 - first_key;
  const int64_t first = call.sliding_window > 0 ? last - call.sliding_window : 0;
  return {clip(first, size), clip(last, size)};
}

template <typename T>
static void load_queries(const AttentionCall& call, const QueryTile& tile, int64_t kv_head,
                         float* queries) {
  const int64_t group = call.num_heads / call.num_kv_heads;
  const float scale = call.softcap > 0.0f ? call.scale / call.softcap : call.scale * kLog2E;
  for (int64_t token = 0; token < tile.num_tokens; ++token) {
    const T* from = static_cast<const T*>(call.query) +
                    (tile.first_token + token) * call.query_token_stride +
                    kv_head * group * call.query_head_stride;
    for (int64_t head = 0; head < group; ++head) {
      for (int64_t d = 0; d < call.head_size; ++d) {
        queries[d] = to_float(from[head * call.query_head_stride + d]) * scale;
      }
      queries += call.head_size;
    }
  }
}

template <typename T>
static void attend_typed(const AttentionCall& call, const QueryTile& tile, int64_t kv_head,
                         KeyRange range, const AttentionScratch& scratch,
                         const AttentionState& state) {
  const int64_t group = call.num_heads / call.num_kv_heads;
  const int64_t num_rows = tile.num_tokens * group, stride = padded(call.head_size);
  load_queries<T>(call, tile, kv_head, scratch.queries);
  for (int64_t i = 0; i < num_rows; ++i) state.maximum[i] = kMinusInfinity;
  for (int64_t i = 0; i < num_rows * kLanes; ++i) scratch.lane_sums[i] = 0.0f;
  for (int64_t i = 0; i < num_rows * stride; ++i) state.value[i] = 0.0f;

  KeyTile<T> keys;
  const float* values[kKeyTile];
  for (int64_t key = range.first; key < range.last; key += kKeyTile) {
    keys.size = range.last - key < kKeyTile ? range.last - key : kKeyTile;
    locate(call, tile, kv_head, key, keys);
    transpose_keys(keys, call.head_size, scratch.keys);
    point_to_values(keys, call.head_size, num_rows, scratch.values, values);
    for (int64_t row = 0; row < num_rows; row += kTileRows) {
      const int64_t count = num_rows - row < kTileRows ? num_rows - row : kTileRows;
      Visible seen[kTileRows];
      for (int64_t r = 0; r < count; ++r) {
        seen[r] = visible(call, tile.first_position + (row + r) / group, key, keys.size);
      }
      if (seen[0].first == keys.size || seen[count - 1].last == 0) continue;
      kScoreRows[count - 1](scratch.queries + row * call.head_size, scratch.keys, keys.size,
                            call.head_size, scratch.weights);
      for (int64_t r = 0; r < count; ++r) {
        soften(scratch.weights + r * kKeyTile, seen[r], call.softcap, state.maximum[row + r],
               scratch.lane_sums + (row + r) * kLanes, state.value + (row + r) * stride, stride);
      }
      add_values(scratch.weights, values, seen, count, call.head_size, state.value + row * stride);
    }
  }
  for (int64_t i = 0; i < num_rows; ++i) state.sum[i] = total(scratch.lane_sums + i * kLanes);
}

static void attend(const AttentionCall& call, const QueryTile& tile, int64_t kv_head,
                   KeyRange range, const AttentionScratch& scratch, const AttentionState& state) {
  switch (call.element) {
    case Element::kFloat32:
      return attend_typed<float>(call, tile, kv_head, range, scratch, state);
    case Element::kBFloat16:
      return attend_typed<BFloat16>(call, tile, kv_head, range, scratch, state);
    case Element::kFloat16:
      return attend_typed<Float16>(call, tile, kv_head, range, scratch, state);
  }
}

// Folds the state of the next keys into `into`, which is exact where one of the two saw nothing.
static void merge(const AttentionState& into, const AttentionState& next, int64_t num_rows,
                  int64_t value_size) {
  for (int64_t row = 0; row < num_rows; ++row) {
    const float before = into.maximum[row], added = next.maximum[row];
    const float raised = before < added ? added : before;
    const float subtracted = raised == kMinusInfinity ? 0.0f : raised;
    const float keep = exp2(before - subtracted), take = exp2(added - subtracted);
    into.maximum[row] = raised;
    into.sum[row] = into.sum[row] * keep + next.sum[row] * take;
    float* to = into.value + row * value_size;
    const float* from = next.value + row * value_size;
    for (int64_t d = 0; d < value_size; d += kLanes) {
      store(to + d, multiply_add(load(from + d), broadcast(take), load(to + d) * keep));
    }
  }
}

template <typename T>
static void finish_typed(const AttentionCall& call, const QueryTile& tile, int64_t kv_head,
                         const AttentionState& state) {
  const int64_t group = call.num_heads / call.num_kv_heads, stride = padded(call.head_size);
  for (int64_t row = 0; row < tile.num_tokens * group; ++row) {
    const int64_t token = tile.first_token + row / group, head = kv_head * group + row % group;
    float keep = 1.0f, sum = state.sum[row];
    if (call.sinks != nullptr) {
      const float sink = call.sinks[head] * kLog2E, maximum = state.maximum[row];
      const float raised = maximum < sink ? sink : maximum;
      keep = exp2(maximum - raised);
      sum = sum * keep + exp2(sink - raised);
    }
    const float factor = sum == 0.0f ? 0.0f : keep / sum;
    T* to = static_cast<T*>(call.out) + (token * call.num_heads + head) * call.head_size;
    for (int64_t d = 0; d < call.head_size; ++d) {
      convert(state.value[row * stride + d] * factor, to + d);
    }
  }
}

static void finish(const AttentionCall& call, const QueryTile& tile, int64_t kv_head,
                   const AttentionState& state) {
  switch (call.element) {
    case Element::kFloat32:
      return finish_typed<float>(call, tile, kv_head, state);
    case Element::kBFloat16:
      return finish_typed<BFloat16>(call, tile, kv_head, state);
    case Element::kFloat16:
      return finish_typed<Float16>(call, tile, kv_head, state);
  }
}

constexpr AttentionKernels kKernels = {attend, merge, finish};

}  // namespace fastspec::cpu::FASTSPEC_ISA::attention
