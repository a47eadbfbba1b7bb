// One query tile against a range of keys: online softmax over tiles of 64 keys.
//
// A row goes through a sequence of operations that depends on its own position only: key tiles and
// splits start at multiples of their size, sums run over keys in ascending order, and rows that
// share a register tile never mix. So its bits do not depend on the other rows of the call.
#include "attention_tiles.inl"

namespace fastspec::cpu::FASTSPEC_ISA {
namespace {

constexpr float kMinusInfinity = -kInfinity;
constexpr int64_t kKeyStep = 16;  // keys before the next KV head takes its turn

// Turns scores into 2^(score - maximum), updates the row's state and rescales what it has summed.
void soften(float* scores, KeyRange keys, float softcap, int64_t row,
            const AttentionScratch& scratch, const AttentionState& state, int64_t stride) {
  constexpr int num_vectors = kKeyTile / kNativeLanes;
  const int64_t begin = keys.first / kNativeLanes;
  const int64_t end = (keys.last + kNativeLanes - 1) / kNativeLanes;
  NativeI32 lane;
  for (int i = 0; i < kNativeLanes; ++i) lane[i] = i;
  NativeF32 score[num_vectors];
  NativeF32 highest = native(kMinusInfinity);
  for (int64_t v = begin; v < end; ++v) {
    NativeF32 x = load_native(scores + v * kNativeLanes);
    if (softcap > 0.0f) x = tanh(x) * (softcap * kLog2E);
    const NativeI32 key = lane + static_cast<int32_t>(v * kNativeLanes);
    const NativeI32 seen =
        (key >= static_cast<int32_t>(keys.first)) & (key < static_cast<int32_t>(keys.last));
    score[v] = seen ? x : native(kMinusInfinity);
    highest = highest < score[v] ? score[v] : highest;
  }
  const float before = state.maximum[row], found = largest(highest);
  const float raised = before < found ? found : before;
  const float origin = raised == kMinusInfinity ? 0.0f : raised;
  const float decay = exp2(before - origin);
  NativeF32 sum = load_native(scratch.lane_sums + row * kNativeLanes) * decay;
  for (int64_t v = begin; v < end; ++v) {
    const NativeF32 weight = exp2(score[v] - origin);
    store_native(scores + v * kNativeLanes, weight);
    sum += weight;
  }
  store_native(scratch.lane_sums + row * kNativeLanes, sum);
  state.maximum[row] = raised;
  if (decay == 1.0f) return;
  float* value = state.value + row * stride;
  for (int64_t d = 0; d < stride; d += kNativeLanes) {
    store_native(value + d, load_native(value + d) * decay);
  }
}

// Adds weights * values. Rows see ascending spans: all share the middle, each has its own ends.
template <bool fetch, class T>
void add_values(const float* weights, const T* const* values, const KeyRange* seen,
                int64_t num_rows, int64_t first_dim, int64_t stride, float* out) {
  const int64_t begin = seen[num_rows - 1].first;
  const int64_t end = begin < seen[0].last ? seen[0].last : begin;
  for (int64_t r = 0; r < num_rows; ++r) {
    const KeyRange head = {seen[r].first, begin < seen[r].last ? begin : seen[r].last};
    if (head.first >= head.last) continue;
    sum_rows<1, false>(weights + r * kKeyTile, values, head, first_dim, stride, out + r * stride);
  }
  if (begin < end) {
    kSumRows<fetch, T>[num_rows - 1](weights, values, {begin, end}, first_dim, stride, out);
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    const KeyRange tail = {end > seen[r].first ? end : seen[r].first, seen[r].last};
    if (tail.first >= tail.last) continue;
    sum_rows<1, false>(weights + r * kKeyTile, values, tail, first_dim, stride, out + r * stride);
  }
}

// Where a row of the tile lies in query and out.
struct RowOfQuery {
  int64_t token, head;
};

RowOfQuery row_of_query(const AttentionCall& call, const QueryTile& tile, int64_t row) {
  const int64_t group = call.num_heads / call.num_kv_heads, per_head = tile.num_tokens * group;
  return {tile.first_token + row % per_head / group,
          (tile.first_kv_head + row / per_head) * group + row % group};
}

int64_t clip(int64_t x, int64_t limit) { return x < 0 ? 0 : (x < limit ? x : limit); }

// What the token at `position` sees of the tile of `size` keys from first_key on.
KeyRange visible(const AttentionCall& call, int64_t position, int64_t first_key, int64_t size) {
  const int64_t last = position + 1 - first_key;
  const int64_t first = call.sliding_window > 0 ? last - call.sliding_window : 0;
  return {clip(first, size), clip(last, size)};
}

template <class T>
void load_queries(const AttentionCall& call, const QueryTile& tile, float* queries) {
  const int64_t group = call.num_heads / call.num_kv_heads, stride = padded(call.head_size);
  const float scale = call.softcap > 0.0f ? call.scale / call.softcap : call.scale * kLog2E;
  for (int64_t row = 0; row < tile.num_rows; ++row, queries += stride) {
    const RowOfQuery from = row_of_query(call, tile, row);
    widen_row(static_cast<const T*>(call.query) + from.token * call.query_token_stride +
                  from.head * call.query_head_stride,
              call.head_size, queries);
    for (int64_t d = 0; d < stride; d += kNativeLanes) {
      store_native(queries + d, load_native(queries + d) * scale);
    }
  }
}

KeyRange intersect(KeyRange a, KeyRange b) {
  return {a.first > b.first ? a.first : b.first, a.last < b.last ? a.last : b.last};
}

int64_t rows_per_head(const AttentionCall& call, const QueryTile& tile) {
  return tile.num_tokens * (call.num_heads / call.num_kv_heads);
}

// Calls f(first row, number of rows, index of their KV head) for each register tile of rows.
template <class F>
FASTSPEC_INLINE void each_row_tile(int64_t num_heads, int64_t per_head, const F& f) {
  for (int64_t head = 0; head < num_heads; ++head) {
    for (int64_t i = 0; i < per_head; i += kTileRows) {
      f(head * per_head + i, per_head - i < kTileRows ? per_head - i : kTileRows, head);
    }
  }
}

// The rows of num_heads KV heads, from first_row on, against one key tile. Heads take turns every
// few keys, so that caches are read front to back.
template <bool fetch, class T>
void attend_tile(const AttentionCall& call, const QueryTile& tile, int64_t first_row,
                 int64_t num_heads, int64_t first_key, KeyTile<T>& keys,
                 const AttentionScratch& scratch, const AttentionState& state) {
  const int64_t group = call.num_heads / call.num_kv_heads, stride = padded(call.head_size);
  const int64_t per_head = rows_per_head(call, tile);
  const float* queries = scratch.queries + first_row * stride;
  float* out = state.value + first_row * stride;
  KeyRange* const seen = scratch.seen;
  for (int64_t row = 0; row < per_head; ++row) {
    seen[row] = visible(call, tile.first_position + row / group, first_key, keys.size);
  }
  if (seen[0].first == keys.size || seen[per_head - 1].last == 0) return;
  for (int64_t j = 0; j < keys.size; j += kKeyStep) {
    const KeyRange span = {j, j + kKeyStep < keys.size ? j + kKeyStep : keys.size};
    each_row_tile(num_heads, per_head, [&](int64_t row, int64_t count, int64_t head) {
      const auto score = kScoreRows<fetch, T>[count - 1];
      score(queries + row * stride, keys.keys, span, head * call.head_size, stride,
            scratch.weights + row * kKeyTile);
    });
  }
  for (int64_t row = 0; row < num_heads * per_head; ++row) {
    soften(scratch.weights + row * kKeyTile, seen[row % per_head], call.softcap, first_row + row,
           scratch, state, stride);
  }
  for (int64_t j = 0; j < keys.size; j += kKeyStep) {
    each_row_tile(num_heads, per_head, [&](int64_t row, int64_t count, int64_t head) {
      KeyRange spans[kTileRows];
      for (int64_t r = 0; r < count; ++r) {
        spans[r] = intersect(seen[(row + r) % per_head], {j, j + kKeyStep});
      }
      add_values<fetch>(scratch.weights + row * kKeyTile, keys.values(), spans, count,
                        head * call.head_size, stride, out + row * stride);
    });
  }
}

template <class T>
void attend_typed(const AttentionCall& call, const QueryTile& tile, KeyRange range,
                  const AttentionScratch& scratch, const AttentionState& state) {
  load_queries<T>(call, tile, scratch.queries);
  for (int64_t i = 0; i < tile.num_rows; ++i) state.maximum[i] = kMinusInfinity;
  std::memset(scratch.lane_sums, 0, tile.num_rows * kNativeLanes * sizeof(float));
  std::memset(state.value, 0, tile.num_rows * padded(call.head_size) * sizeof(float));
  const int64_t per_head = rows_per_head(call, tile);
  const bool in_place = call.head_size == padded(call.head_size);
  for (int64_t key = range.first; key < range.last; key += kKeyTile) {
    const int64_t size = range.last - key < kKeyTile ? range.last - key : kKeyTile;
    if (in_place) {
      KeyTile<T> keys;
      locate_tile(call, tile, key, range.last, keys);
      attend_tile<true>(call, tile, 0, tile.num_kv_heads, key, keys, scratch, state);
      continue;
    }
    KeyTile<float> keys;
    keys.size = size;
    for (int64_t head = 0; head < tile.num_kv_heads; ++head) {
      copy_tile<T>(call, tile, key, tile.first_kv_head + head, scratch, keys);
      attend_tile<false>(call, tile, head * per_head, 1, key, keys, scratch, state);
    }
  }
  for (int64_t i = 0; i < tile.num_rows; ++i) {
    state.sum[i] = total(load_native(scratch.lane_sums + i * kNativeLanes));
  }
}

void attend(const AttentionCall& call, const QueryTile& tile, KeyRange range,
            const AttentionScratch& scratch, const AttentionState& state) {
  switch (call.element) {
    case Element::kFloat32:
      return attend_typed<float>(call, tile, range, scratch, state);
    case Element::kBFloat16:
      return attend_typed<BF16>(call, tile, range, scratch, state);
    case Element::kFloat16:
      return attend_typed<F16>(call, tile, range, scratch, state);
  }
}

// Folds the state of the next keys into `into`, which is exact where one of the two saw nothing.
void merge(const AttentionState& into, const AttentionState& next, int64_t num_rows,
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
    for (int64_t d = 0; d < value_size; d += kNativeLanes) {
      store_native(to + d,
                   multiply_add(load_native(from + d), native(take), load_native(to + d) * keep));
    }
  }
}

template <class T>
void finish_typed(const AttentionCall& call, const QueryTile& tile, const AttentionState& state) {
  const int64_t stride = padded(call.head_size);
  for (int64_t row = 0; row < tile.num_rows; ++row) {
    const RowOfQuery at = row_of_query(call, tile, row);
    float keep = 1.0f, sum = state.sum[row];
    if (call.sinks != nullptr) {
      const float sink = call.sinks[at.head] * kLog2E, maximum = state.maximum[row];
      const float raised = maximum < sink ? sink : maximum;
      keep = exp2(maximum - raised);
      sum = sum * keep + exp2(sink - raised);
    }
    const float factor = sum == 0.0f ? 0.0f : keep / sum;
    T* to = static_cast<T*>(call.out) + (at.token * call.num_heads + at.head) * call.head_size;
    for (int64_t d = 0; d < call.head_size; ++d) {
      convert(state.value[row * stride + d] * factor, to + d);
    }
  }
}

void finish(const AttentionCall& call, const QueryTile& tile, const AttentionState& state) {
  switch (call.element) {
    case Element::kFloat32:
      return finish_typed<float>(call, tile, state);
    case Element::kBFloat16:
      return finish_typed<BF16>(call, tile, state);
    case Element::kFloat16:
      return finish_typed<F16>(call, tile, state);
  }
}

constexpr AttentionKernels kAttention = {attend, merge, finish};

}  // namespace
}  // namespace fastspec::cpu::FASTSPEC_ISA
