// The register tiles of attention: a few query rows against the keys, then the values, of a tile.
#include <type_traits>

#include "lanes.h"
#include "tree_attention.h"

namespace fastspec::cpu::FASTSPEC_ISA {
namespace {

constexpr int kTileRows = 4;
constexpr int kPackedRows = 6;  // of a register tile on packed keys
constexpr int kTileVectors = kNativeLanes == 16 ? 4 : 2;
constexpr int64_t kAhead = 24;  // prefetch distance in rows, at most kKeyTile

// Rows of consecutive keys in reading order: the keys, the values, the keys of the next tile. Each
// row is one KV head, or several adjacent ones. Rows past the end repeat another row.
template <class T>
struct KeyTile {
  const T* keys[3 * kKeyTile];
  int64_t size;

  const T** values() { return keys + kKeyTile; }
  const T** next_keys() { return keys + 2 * kKeyTile; }
};

// Calls f(offset of the key's row in either cache, j) for the first `size` keys from first_key on.
template <class F>
FASTSPEC_INLINE void each_key(const AttentionCall& call, const QueryTile& tile, int64_t first_key,
                              int64_t size, const F& f) {
  const int32_t* table = call.block_table + tile.sequence * call.table_stride;
  int64_t block = first_key / call.block_size, slot = first_key % call.block_size;
  for (int64_t j = 0; j < size; ++j) {
    f(table[block] * call.block_stride + slot * call.slot_stride, j);
    if (++slot == call.block_size) {
      slot = 0;
      ++block;
    }
  }
}

// Points at the rows in the caches, from the tile's first KV head on.
template <class T>
void locate_tile(const AttentionCall& call, const QueryTile& tile, int64_t first_key,
                 int64_t last_key, KeyTile<T>& to) {
  const T* keys = static_cast<const T*>(call.key_cache) + tile.first_kv_head * call.head_size;
  const T* values = static_cast<const T*>(call.value_cache) + tile.first_kv_head * call.head_size;
  const int64_t left = last_key - first_key;
  to.size = left < kKeyTile ? left : kKeyTile;
  int64_t ahead = left - to.size < kKeyTile ? left - to.size : kKeyTile;
  each_key(call, tile, first_key, to.size, [&](int64_t offset, int64_t j) {
    to.keys[j] = keys + offset;
    to.values()[j] = values + offset;
  });
  each_key(call, tile, first_key + to.size, ahead,
           [&](int64_t offset, int64_t j) { to.next_keys()[j] = keys + offset; });
  for (int64_t j = to.size; j < kKeyTile; ++j) {
    to.keys[j] = to.keys[j - 1];
    to.values()[j] = to.values()[j - 1];
  }
  for (; ahead < kKeyTile; ++ahead) to.next_keys()[ahead] = to.keys[0];
}

// Into the second-level cache; the first is too small for rows a power of two apart.
template <class T>
FASTSPEC_INLINE void prefetch(const T* row, int64_t size) {
  for (int64_t d = 0; d < size; d += 64 / static_cast<int64_t>(sizeof(T))) {
    __builtin_prefetch(row + d, 0, 2);
  }
}

// Prefetches parts of the next rows, a few cache lines at a time; more at once would stall.
template <class T>
struct NextRows {
  const T* const* rows;
  int64_t first_dim, size, lines;
  int64_t row = 0, dim = 0;

  FASTSPEC_INLINE void fetch() {
    for (int64_t i = 0; i < lines && row < kKeyTile; ++i) {
      __builtin_prefetch(rows[row] + first_dim + dim, 0, 2);
      dim += 64 / static_cast<int64_t>(sizeof(T));
      if (dim >= size) {
        dim = 0;
        ++row;
      }
    }
  }
};

// scores[row][key] = scale * the sum over the lanes of sums[row][key].
template <int rows, int num_keys>
FASTSPEC_INLINE void store_scores(NativeF32 (&sums)[kNativeLanes], float scale, float* scores) {
  const NativeF32 sum = sum_each(sums) * scale;
  for (int r = 0; r < rows; ++r) {
    std::memcpy(scores + r * kKeyTile, reinterpret_cast<const float*>(&sum) + r * num_keys,
                num_keys * sizeof(float));
  }
}

// scores[row][key] = scale * sum over d of queries[row][d] * keys[key][d], in the same order for
// each pair.
template <int rows, int num_keys, class T>
FASTSPEC_INLINE void multiply_keys(const float* queries, const T* const* keys, int64_t first_dim,
                                   int64_t stride, float scale, float* scores) {
  NativeF32 sums[kNativeLanes] = {};
  for (int64_t d = 0; d < stride; d += kNativeLanes) {
    NativeF32 key[num_keys];
    for (int k = 0; k < num_keys; ++k) key[k] = load_native(keys[k] + first_dim + d);
    for (int r = 0; r < rows; ++r) {
      const NativeF32 query = load_native(queries + r * stride + d);
      for (int k = 0; k < num_keys; ++k) {
        sums[r * num_keys + k] = multiply_add(query, key[k], sums[r * num_keys + k]);
      }
    }
  }
  store_scores<rows, num_keys>(sums, scale, scores);
}

// Keys processed at once by this many rows, one register of sums.
template <int rows>
constexpr int kTileKeys = kNativeLanes / (rows <= 2 ? rows : 4);

// Scores the keys of a span that starts at a whole vector; first_dim chooses the KV head of the
// rows.
template <int rows, bool fetch, class T>
void score_rows(const float* queries, const T* const* keys, KeyRange span, int64_t first_dim,
                int64_t stride, float scale, float* scores) {
  constexpr int num_keys = kTileKeys<rows>;
  for (int64_t j = span.first; j < span.last; j += num_keys) {
    if constexpr (fetch) {
      for (int k = 0; k < num_keys; ++k) prefetch(keys[j + kAhead + k] + first_dim, stride);
    }
    multiply_keys<rows, num_keys>(queries, keys + j, first_dim, stride, scale, scores + j);
  }
}

// out[row][d] += sum over a span of weights[row][key] * values[key][first_dim + d].
template <int rows, int vectors, bool fetch, class T>
FASTSPEC_INLINE void multiply_values(const float* weights, const T* const* values, KeyRange span,
                                     int64_t first_dim, float* out, int64_t stride) {
  NativeF32 sums[rows][vectors];
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < vectors; ++v) sums[r][v] = load_native(out + r * stride + v * kNativeLanes);
  }
  for (int64_t j = span.first; j < span.last; ++j) {
    if constexpr (fetch) prefetch(values[j + kAhead] + first_dim, vectors * kNativeLanes);
    NativeF32 value[vectors];
    for (int v = 0; v < vectors; ++v) {
      value[v] = load_native(values[j] + first_dim + v * kNativeLanes);
    }
    for (int r = 0; r < rows; ++r) {
      const NativeF32 weight = native(weights[r * kKeyTile + j]);
      for (int v = 0; v < vectors; ++v) sums[r][v] = multiply_add(weight, value[v], sums[r][v]);
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < vectors; ++v) store_native(out + r * stride + v * kNativeLanes, sums[r][v]);
  }
}

template <int rows, bool fetch, class T>
void sum_rows(const float* weights, const T* const* values, KeyRange span, int64_t first_dim,
              int64_t stride, float* out) {
  constexpr int64_t step = kTileVectors * kNativeLanes;
  int64_t d = 0;
  for (; d + step <= stride; d += step) {
    multiply_values<rows, kTileVectors, fetch>(weights, values, span, first_dim + d, out + d,
                                               stride);
  }
  for (; d < stride; d += kNativeLanes) {
    multiply_values<rows, 1, fetch>(weights, values, span, first_dim + d, out + d, stride);
  }
}

// Indexed by the number of rows - 1.
template <bool fetch, class T>
constexpr decltype(&score_rows<1, fetch, T>) kScoreRows[kTileRows] = {
    score_rows<1, fetch, T>, score_rows<2, fetch, T>, score_rows<3, fetch, T>,
    score_rows<4, fetch, T>};
template <bool fetch, class T>
constexpr decltype(&sum_rows<1, fetch, T>) kSumRows[kPackedRows] = {
    sum_rows<1, fetch, T>, sum_rows<2, fetch, T>, sum_rows<3, fetch, T>,
    sum_rows<4, fetch, T>, sum_rows<5, fetch, T>, sum_rows<6, fetch, T>};

}  // namespace
}  // namespace fastspec::cpu::FASTSPEC_ISA
