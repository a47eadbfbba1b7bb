// One query tile against a range of keys: online softmax over tiles of 64 keys.
//
// A row's sequence of operations depends only on what it sees: key tiles and splits start at
// multiples of their size, sums run over keys in ascending order, and rows that share a register
// tile never mix. So its bits do not depend on the other rows of the call. Tiles that all rows see
// in full have no masks; the others have a word of bits for each token.
#include "attention_dot.inl"

namespace fastspec::cpu::FASTSPEC_ISA {
namespace {

constexpr float kMinusInfinity = -kInfinity;
constexpr int64_t kGroupForTiles = 4;      // query heads of a KV head
constexpr int64_t kQueriesForTiles = 192;  // values of a smaller group's heads together
constexpr int64_t kRowsToPack = 32;        // of a KV head
constexpr int64_t kKeyStep = 16;           // keys before switching to the next KV head

constexpr uint64_t kAllSeen = ~uint64_t{0};

// All bits of lane i are set if bit i is.
FASTSPEC_INLINE NativeI32 lanes_of(uint64_t bits) {
  NativeI32 bit;
  for (int i = 0; i < kNativeLanes; ++i) bit[i] = int32_t{1} << i;
  return (bit & static_cast<int32_t>(bits)) != 0;
}

// Turns scores into 2^(score - maximum), updates the row's state and rescales its sums. A row that
// sees part of the tile checks its bits, in whole vectors around them.
template <bool masked>
FASTSPEC_INLINE void soften(float* scores, uint64_t seen, float softcap, int64_t row,
                            const AttentionScratch& scratch, const AttentionState& state,
                            int64_t stride) {
  constexpr int num_vectors = kKeyTile / kNativeLanes;
  if (masked && seen == 0) return;
  const int64_t begin = masked ? __builtin_ctzll(seen) / kNativeLanes : 0;
  const int64_t end = masked ? num_vectors - __builtin_clzll(seen) / kNativeLanes : num_vectors;
  NativeF32 score[num_vectors];
  NativeF32 highest = native(kMinusInfinity);
  for (int64_t v = begin; v < end; ++v) {
    NativeF32 x = load_native(scores + v * kNativeLanes);
    if (softcap > 0.0f) x = tanh(x) * (softcap * kLog2E);
    if (masked) x = lanes_of(seen >> v * kNativeLanes) ? x : native(kMinusInfinity);
    score[v] = x;
    highest = highest < x ? x : highest;
  }
  const float before = state.maximum[row], found = largest(highest);
  const float raised = before < found ? found : before;
  const float origin = raised == kMinusInfinity ? 0.0f : raised;
  const float decay = exp2(before - origin);
  NativeF32 sum = {};
  for (int64_t v = begin; v < end; ++v) {
    const NativeF32 weight = exp2(score[v] - origin);
    store_native(scores + v * kNativeLanes, weight);
    sum += weight;
  }
  // One explicit operation, which the compiler cannot round differently when it unrolls.
  float* lane_sums = scratch.lane_sums + row * kNativeLanes;
  store_native(lane_sums, multiply_add(load_native(lane_sums), native(decay), sum));
  state.maximum[row] = raised;
  if (decay == 1.0f) return;
  float* value = state.value + row * stride;
  for (int64_t d = 0; d < stride; d += kNativeLanes) {
    store_native(value + d, load_native(value + d) * decay);
  }
}

// Adds weights * values of the keys that each row sees, in ascending order; rows that see the same
// run of keys share its loads.
template <bool fetch, class T>
void add_seen_values(const float* weights, const T* const* values, const uint64_t* seen,
                     int64_t num_rows, int64_t first_dim, int64_t stride, float* out) {
  uint64_t left = 0, changes = 0;
  for (int64_t r = 0; r < num_rows; ++r) {
    left |= seen[r];
    changes |= seen[r] ^ seen[r] << 1;  // bit j is set if key j and the one before differ
  }
  while (left != 0) {
    const int64_t first = __builtin_ctzll(left);
    const uint64_t later = changes >> first >> 1;
    const KeyRange run = {first, later == 0 ? kKeyTile : first + 1 + __builtin_ctzll(later)};
    bool all = true;
    for (int64_t r = 0; r < num_rows; ++r) all &= (seen[r] >> first & 1) != 0;
    if (all) kSumRows<fetch, T>[num_rows - 1](weights, values, run, first_dim, stride, out);
    for (int64_t r = 0; !all && r < num_rows; ++r) {
      if ((seen[r] >> first & 1) == 0) continue;
      sum_rows<1, false>(weights + r * kKeyTile, values, run, first_dim, stride, out + r * stride);
    }
    left &= run.last == kKeyTile ? 0 : kAllSeen << run.last;
  }
}

// The location of a row of the tile in query and out.
struct RowOfQuery {
  int64_t token, head;
};

RowOfQuery row_of_query(const AttentionCall& call, const QueryTile& tile, int64_t row) {
  const int64_t group = call.num_heads / call.num_kv_heads, per_head = tile.num_tokens * group;
  return {tile.first_token + row % per_head / group,
          (tile.first_kv_head + row / per_head) * group + row % group};
}

// The bits of a range of a tile.
uint64_t bits_of(int64_t first, int64_t last) {
  if (last <= 0 || first >= kKeyTile || first >= last) return 0;
  const uint64_t below = first > 0 ? kAllSeen << first : kAllSeen;
  return last < kKeyTile ? below & ~(kAllSeen << last) : below;
}

// What a token sees of the tile from first_key on.
uint64_t seen_of(const Sight& sight, int64_t first_key) {
  const uint64_t places = bits_of(sight.places.first - first_key, sight.places.last - first_key);
  uint64_t nodes = 0;
  for (int64_t w = 0; w < 2; ++w) {
    const int64_t shift = sight.root + w * 64 - first_key;
    if (shift >= 0 && shift < 64) nodes |= sight.nodes[w] << shift;
    if (shift < 0 && shift > -64) nodes |= sight.nodes[w] >> -shift;
  }
  return places | nodes;
}

template <class T>
void load_queries(const AttentionCall& call, const QueryTile& tile, float* queries) {
  const bool as_they_are = keeps_bfloat16<T>(call.head_size);
  for (int64_t row = 0; row < tile.num_rows; ++row, queries += padded(call.head_size)) {
    const RowOfQuery at = row_of_query(call, tile, row);
    const T* from = static_cast<const T*>(call.query) + at.token * call.query_token_stride +
                    at.head * call.query_head_stride;
    if (as_they_are) {
      std::memcpy(queries, from, call.head_size * sizeof(T));
    } else {
      widen_row(from, call.head_size, queries);
    }
  }
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

// Whether some of `count` rows of a KV head see a key of the tile.
bool any_sees(const AttentionScratch& scratch, int64_t row, int64_t count, int64_t group) {
  uint64_t any = 0;
  for (int64_t t = row / group; t <= (row + count - 1) / group; ++t) any |= scratch.seen[t];
  return any != 0;
}

// The factor of scores before `soften`.
float scale_of_scores(const AttentionCall& call) {
  return call.softcap > 0.0f ? call.scale / call.softcap : call.scale * kLog2E;
}

#include "attention_amx.inl"
#include "attention_packed.inl"

// All rows of a tile against one key tile in the caches, which they see in full unless `masked`. KV
// heads alternate every few keys, so that caches are read front to back.
template <bool masked, class T>
void attend_in_place(const AttentionCall& call, const QueryTile& tile, KeyTile<T>& keys,
                     const AttentionScratch& scratch, const AttentionState& state) {
  const int64_t group = call.num_heads / call.num_kv_heads, stride = call.head_size;
  const int64_t num_heads = tile.num_kv_heads, per_head = tile.num_tokens * group;
  const float* queries = scratch.queries;
  float* out = state.value;
  const float scale = scale_of_scores(call);
  const auto* const score = score_functions<true, T>();
  for (int64_t j = 0; j < keys.size; j += kKeyStep) {
    const KeyRange span = {j, j + kKeyStep < keys.size ? j + kKeyStep : keys.size};
    each_row_tile(num_heads, per_head, [&](int64_t row, int64_t count, int64_t head) {
      score[count - 1](queries + row * stride, keys.keys, span, head * call.head_size, stride,
                       scale, scratch.weights + row * kKeyTile);
    });
  }
  for (int64_t row = 0; row < num_heads * per_head; ++row) {
    const uint64_t seen = masked ? scratch.seen[row % per_head / group] : kAllSeen;
    soften<masked>(scratch.weights + row * kKeyTile, seen, call.softcap, row, scratch, state,
                   stride);
  }
  for (int64_t j = 0; j < keys.size; j += kKeyStep) {
    each_row_tile(num_heads, per_head, [&](int64_t row, int64_t count, int64_t head) {
      const float* weights = scratch.weights + row * kKeyTile;
      const int64_t first_dim = head * call.head_size;
      if constexpr (masked) {
        uint64_t seen[kTileRows];
        for (int64_t r = 0; r < count; ++r) {
          seen[r] = scratch.seen[(row + r) % per_head / group] & bits_of(j, j + kKeyStep);
        }
        add_seen_values<true>(weights, keys.values(), seen, count, first_dim, stride,
                              out + row * stride);
      } else {
        kSumRows<true, T>[count - 1](weights, keys.values(), {j, j + kKeyStep}, first_dim, stride,
                                     out + row* stride);
      }
    });
  }
}

// Fills scratch.seen; false if no token sees any key of the tile.
bool look_at(const QueryTile& tile, int64_t first_key, const AttentionScratch& scratch) {
  uint64_t any = 0;
  for (int64_t token = 0; token < tile.num_tokens; ++token) {
    any |= scratch.seen[token] = seen_of(tile.sights[token], first_key);
  }
  return any != 0;
}

// Whether to use AMX. Because no bit may depend on the number of rows, a single row of a sequence
// must fill its tiles well enough.
template <class T>
bool by_tiles(const AttentionCall& call) {
  const int64_t group = call.num_heads / call.num_kv_heads;
  return std::is_same_v<T, BF16> && multiplies_tiles() &&
         (group >= kGroupForTiles || (group > 1 && group * call.head_size >= kQueriesForTiles));
}

// Whether packing keys can pay off. It saves sums across lanes, which AMD's processors overlap with
// 512-bit products at no cost: there it took 1 to 20 % longer for any number of rows.
bool may_pay_to_pack() {
#if defined(__AVX512F__)
  return !__builtin_cpu_is("amd");
#else
  return true;
#endif
}

// Whether a tile has enough rows for packing its keys to pay off, or heads of odd size.
template <class T>
bool packs(const AttentionCall& call, const QueryTile& tile) {
  if (call.head_size != padded(call.head_size)) return true;
  if (!may_pay_to_pack()) return false;
  return tile.num_rows / tile.num_kv_heads >= kRowsToPack && !keeps_bfloat16<T>(call.head_size);
}

template <bool masked, class T>
void attend_keys(const AttentionCall& call, const QueryTile& tile, int64_t key, int64_t last_key,
                 const AttentionScratch& scratch, const AttentionState& state) {
  KeyTile<T> keys;
  locate_tile(call, tile, key, last_key, keys);
  if constexpr (std::is_same_v<T, BF16>) {
    if (by_tiles<T>(call)) return attend_by_tiles<masked>(call, tile, keys, scratch, state);
  }
  if (!packs<T>(call, tile)) return attend_in_place<masked>(call, tile, keys, scratch, state);
  for (int64_t head = 0; head < tile.num_kv_heads; ++head) {
    const bool last = head + 1 == tile.num_kv_heads;
    const NextRows<T> next = {last ? keys.next_keys() : keys.keys,
                              last ? 0 : (head + 1) * call.head_size, call.head_size,
                              2 * kLinesAtATime};
    attend_packed<masked>(call, tile, head, keys, next, scratch, state);
  }
}

template <class T>
void attend_typed(const AttentionCall& call, const QueryTile& tile, KeyRange range,
                  const AttentionScratch& scratch, const AttentionState& state) {
  if (by_tiles<T>(call)) {
    configure_tiles();
    pack_queries(call, tile, scratch);
  } else {
    load_queries<T>(call, tile, scratch.queries);
  }
  for (int64_t i = 0; i < tile.num_rows; ++i) state.maximum[i] = kMinusInfinity;
  std::memset(state.sum, 0, tile.num_rows * sizeof(float));
  std::memset(scratch.lane_sums, 0, tile.num_rows * kNativeLanes * sizeof(float));
  std::memset(state.value, 0, tile.num_rows * padded(call.head_size) * sizeof(float));
  for (int64_t key = range.first; key < range.last; key += kKeyTile) {
    if (key >= tile.shared.first && key + kKeyTile <= tile.shared.last) {
      attend_keys<false, T>(call, tile, key, range.last, scratch, state);
    } else if (look_at(tile, key, scratch)) {
      attend_keys<true, T>(call, tile, key, range.last, scratch, state);
    }
  }
  if (by_tiles<T>(call)) return release_tiles();
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
    default:
      return attend_typed<F16>(call, tile, range, scratch, state);
  }
}

// Folds the state of the next keys into `into`; exact if one of the two saw nothing.
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
    if (call.logsumexp != nullptr) {
      call.logsumexp[at.token * call.num_heads + at.head] =
          (state.maximum[row] + __builtin_log2f(sum)) / kLog2E;
    }
    if (call.sinks != nullptr) {
      const float sink = call.sinks[at.head] * kLog2E, maximum = state.maximum[row];
      const float raised = maximum < sink ? sink : maximum;
      const float origin = raised == -kInfinity ? 0.0f : raised;
      keep = exp2(maximum - origin);
      sum = sum * keep + (sink == origin ? 1.0f : exp2(sink - origin));  // also an infinite one
    }
    const float factor = sum == 0.0f ? 0.0f : keep / sum;
    T* to = static_cast<T*>(call.out) + (at.token * call.num_heads + at.head) * call.head_size;
    const float* value = state.value + row * stride;
    int64_t d = 0;
    for (; d + kNativeLanes <= call.head_size; d += kNativeLanes) {
      store_native(to + d, load_native(value + d) * factor);
    }
    for (; d < call.head_size; ++d) convert(value[d] * factor, to + d);
  }
}

void finish(const AttentionCall& call, const QueryTile& tile, const AttentionState& state) {
  switch (call.element) {
    case Element::kFloat32:
      return finish_typed<float>(call, tile, state);
    case Element::kBFloat16:
      return finish_typed<BF16>(call, tile, state);
    default:
      return finish_typed<F16>(call, tile, state);
  }
}

constexpr AttentionKernels kAttention = {attend, merge, finish};

}  // namespace
}  // namespace fastspec::cpu::FASTSPEC_ISA
