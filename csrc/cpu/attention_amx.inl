// bfloat16 rows against a key tile by AMX. Values are packed, and keys for many rows; few rows load
// the same register tiles from the cache. Scores have keys along the rows of a register tile.
// Weights become bfloat16. Included by tree_attention.inl.
//
// Rows of a register tile never mix, so a row's bits do not depend on the others.

#if defined(__AVX512F__) && FASTSPEC_COMPILES_AMX

constexpr int64_t kBlock = kTileRowsOfAmx;
constexpr int64_t kKeyBlocks = kKeyTile / kBlock;
constexpr int64_t kColumns = 4;           // register tiles of 16 values side by side
constexpr int64_t kMostRowsInPlace = 16;  // of a KV head, that read keys where the cache has them

// Rows of one KV head of a query tile, and the locations of its packed operands.
struct HeadBlocks {
  int64_t num_rows, first_row, tiles;  // tiles of kPairDepth in a row
  PairTile* queries;                   // [blocks of 16 rows, tiles]
  BF16* keys;                          // [kKeyTile, tiles * kPairDepth]
  BF16* values;                        // [kKeyTile / 2, stride, 2]
};

HeadBlocks blocks_of(const AttentionCall& call, const QueryTile& tile, int64_t head,
                     const AttentionScratch& scratch) {
  const int64_t num_rows = tile.num_rows / tile.num_kv_heads, tiles = pair_tiles(call.head_size);
  const int64_t size = kKeyTile * tiles * kPairDepth;
  return {num_rows,
          head * num_rows,
          tiles,
          reinterpret_cast<PairTile*>(scratch.queries) + head * row_blocks(num_rows) * tiles,
          reinterpret_cast<BF16*>(scratch.keys) + head * size,
          reinterpret_cast<BF16*>(scratch.values) + head * size};
}

void pack_queries(const AttentionCall& call, const QueryTile& tile,
                  const AttentionScratch& scratch) {
  for (int64_t head = 0; head < tile.num_kv_heads; ++head) {
    const HeadBlocks blocks = blocks_of(call, tile, head, scratch);
    for (int64_t i = 0; i < blocks.num_rows; i += kBlock) {
      const int64_t count = blocks.num_rows - i < kBlock ? blocks.num_rows - i : kBlock;
      const BF16* rows[kBlock];
      for (int64_t r = 0; r < count; ++r) {
        const RowOfQuery at = row_of_query(call, tile, blocks.first_row + i + r);
        rows[r] = static_cast<const BF16*>(call.query) + at.token * call.query_token_stride +
                  at.head * call.query_head_stride;
      }
      pack_block(rows, count, call.head_size, blocks.queries + i / kBlock * blocks.tiles);
    }
  }
}

// The first `count` values, then zeros; all values if `whole`.
template <bool whole>
FASTSPEC_INLINE __m512i load_halves(const BF16* from, int64_t count) {
  if constexpr (whole) return _mm512_loadu_si512(from);
  const __mmask32 mask = count >= kPairDepth ? ~__mmask32{0} : count > 0 ? (1u << count) - 1 : 0;
  return _mm512_maskz_loadu_epi16(mask, from);
}

// Keys of `heads` adjacent KV heads; zeros after the first `size` keys.
template <bool whole>
void pack_keys(const KeyTile<BF16>& keys, int64_t heads, int64_t head_size, BF16* to) {
  const int64_t depth = pair_tiles(head_size) * kPairDepth;
  for (int64_t j = 0; j < kKeyTile; ++j, to += depth) {
    for (int64_t head = 0; head < heads; ++head) {
      const BF16* row = keys.keys[j] + head * head_size;
      for (int64_t d = 0; d < depth; d += kPairDepth) {
        const int64_t left = j < keys.size ? head_size - d : 0;
        _mm512_storeu_si512(to + head * kKeyTile * depth + d, load_halves<whole>(row + d, left));
      }
    }
  }
}

// Pairs of values of neighbouring keys, zeros for keys not in `kept`; returns whether any is an
// infinity or NaN. A head takes head_stride values.
template <bool whole>
bool pack_values(const BF16* const* values, uint64_t kept, int64_t heads, int64_t head_size,
                 int64_t head_stride, BF16* to) {
  const __m512i infinity = _mm512_set1_epi16(static_cast<int16_t>(0xff00));  // shifted by its sign
  const __m512i low = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
  const __m512i high = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  const int64_t stride = padded(head_size);
  __mmask32 wild = 0;
  for (int64_t j = 0; j < kKeyTile; j += 2, to += 2 * stride) {
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t d = 0; d < stride; d += kPairDepth) {
        const auto load_key = [&](int64_t key) {
          const int64_t left = (kept >> key & 1) != 0 ? head_size - d : 0;
          const __m512i x = load_halves<whole>(values[key] + head * head_size + d, left);
          wild |= _mm512_cmpge_epu16_mask(_mm512_slli_epi16(x, 1), infinity);
          return x;
        };
        const __m512i a = load_key(j), b = load_key(j + 1);
        const __m512i even = _mm512_unpacklo_epi16(a, b), odd = _mm512_unpackhi_epi16(a, b);
        BF16* pairs = to + head * head_stride + 2 * d;
        _mm512_storeu_si512(pairs, _mm512_permutex2var_epi64(even, low, odd));
        if (d + kBlock >= stride) break;
        _mm512_storeu_si512(pairs + kPairDepth, _mm512_permutex2var_epi64(even, high, odd));
      }
    }
  }
  return wild != 0;
}

// weights[row][key] = scale * query . key of 16 rows, of which `count` are written.
FASTSPEC_AMX void score_block(const PairTile* queries, const BF16* const* keys, int64_t key_stride,
                              int64_t tiles, int64_t count, float scale, float* weights,
                              NextRows<BF16>& next) {
  alignas(64) float scores[kKeyBlocks][kBlock][kBlock];  // [key][row] of each block of keys
  const int64_t bytes = key_stride * sizeof(BF16), depth = tiles * kPairDepth;
  finish_stores(queries);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < depth; d += kPairDepth, ++queries) {
    next.fetch();
    _tile_loadd(4, queries, 64);
    _tile_loadd(5, keys[0] + d, bytes);
    _tile_dpbf16ps(0, 5, 4);
    _tile_loadd(6, keys[1] + d, bytes);
    _tile_dpbf16ps(1, 6, 4);
    _tile_loadd(7, keys[2] + d, bytes);
    _tile_dpbf16ps(2, 7, 4);
    _tile_loadd(5, keys[3] + d, bytes);
    _tile_dpbf16ps(3, 5, 4);
  }
  _tile_stored(0, scores[0], 64);
  _tile_stored(1, scores[1], 64);
  _tile_stored(2, scores[2], 64);
  _tile_stored(3, scores[3], 64);
  for (int64_t block = 0; block < kKeyBlocks; ++block) {
    NativeF32 columns[kNativeLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kNativeLanes; ++i) columns[i] = load_native(scores[block][i]);
    transpose(columns);
    next.fetch();
#pragma GCC unroll 16
    for (int i = 0; i < kNativeLanes; ++i) {
      if (i < count) store_native(weights + i * kKeyTile + block * kBlock, columns[i] * scale);
    }
  }
}

// out[row][d] += sum over keys of weights[row][key] * values[key][d] of up to 16 rows that see any.
FASTSPEC_AMX void sum_block(const float* weights, const uint64_t* seen, const BF16* values,
                            int64_t count, int64_t stride, float* out, NextRows<BF16>& next) {
  alignas(64) BF16 pairs[kBlock][kKeyTile];
  alignas(64) float sums[kBlock][kColumns * kBlock];
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t j = 0; j < kKeyTile; j += kPairDepth) {
      const float* from = weights + r * kKeyTile + j;
      const uint64_t bits = seen[r] >> j;
      const __m512 first = _mm512_maskz_loadu_ps(static_cast<__mmask16>(bits), from);
      const __m512 second = _mm512_maskz_loadu_ps(static_cast<__mmask16>(bits >> 16), from + 16);
      const __m512bh both = _mm512_cvtne2ps_pbh(second, first);
      std::memcpy(&pairs[r][j], &both, sizeof(both));
    }
  }
  finish_stores(pairs);
  const int64_t bytes = stride * 2 * sizeof(BF16);
  for (int64_t d = 0; d < stride; d += kColumns * kBlock, values += 2 * kColumns * kBlock) {
    const int64_t columns = (stride - d) / kBlock;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t j = 0; j < kKeyTile; j += kPairDepth) {
      const BF16* from = values + j * stride;
      next.fetch();
      _tile_loadd(4, &pairs[0][j], kKeyTile * sizeof(BF16));
      _tile_loadd(5, from, bytes);
      _tile_dpbf16ps(0, 4, 5);
      if (columns > 1) {
        _tile_loadd(6, from + 2 * kBlock, bytes);
        _tile_dpbf16ps(1, 4, 6);
      }
      if (columns > 2) {
        _tile_loadd(7, from + 4 * kBlock, bytes);
        _tile_dpbf16ps(2, 4, 7);
      }
      if (columns > 3) {
        _tile_loadd(5, from + 6 * kBlock, bytes);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    _tile_stored(0, &sums[0][0], sizeof(sums[0]));
    _tile_stored(1, &sums[0][kBlock], sizeof(sums[0]));
    _tile_stored(2, &sums[0][2 * kBlock], sizeof(sums[0]));
    _tile_stored(3, &sums[0][3 * kBlock], sizeof(sums[0]));
    for (int64_t r = 0; r < count; ++r) {
      float* to = out + r * stride + d;
      for (int64_t i = 0; i < columns && i < kColumns && seen[r] != 0; ++i) {
        store_native(to + i * kBlock,
                     load_native(to + i * kBlock) + load_native(&sums[r][i * kBlock]));
      }
    }
  }
}

// Adds the weighted values to rows first..last of each KV head.
template <bool masked>
void sum_blocks(const AttentionCall& call, const QueryTile& tile, int64_t first, int64_t last,
                const AttentionScratch& scratch, const AttentionState& state, NextRows<BF16> next) {
  const int64_t group = call.num_heads / call.num_kv_heads, stride = padded(call.head_size);
  for (int64_t head = 0; head < tile.num_kv_heads; ++head) {
    const HeadBlocks blocks = blocks_of(call, tile, head, scratch);
    for (int64_t i = first; i < last; i += kBlock) {
      const int64_t count = last - i < kBlock ? last - i : kBlock, row = blocks.first_row + i;
      if (masked && !any_sees(scratch, i, count, group)) continue;
      uint64_t seen[kBlock];
      for (int64_t r = 0; r < count; ++r)
        seen[r] = masked ? scratch.seen[(i + r) / group] : kAllSeen;
      sum_block(scratch.weights + row * kKeyTile, seen, blocks.values, count, stride,
                state.value + row * stride, next);
    }
  }
}

template <bool masked>
void attend_by_tiles(const AttentionCall& call, const QueryTile& tile, const KeyTile<BF16>& keys,
                     const AttentionScratch& scratch, const AttentionState& state) {
  const int64_t group = call.num_heads / call.num_kv_heads, stride = padded(call.head_size);
  const int64_t size = call.head_size, per_head = tile.num_rows / tile.num_kv_heads;
  const float scale = scale_of_scores(call);
  const bool whole = size % kPairDepth == 0 && keys.size == kKeyTile;
  // The lines of a head are prefetched in as many fetches as its blocks of rows make.
  const int64_t lines = kKeyTile * size * sizeof(BF16) / 64 / row_blocks(per_head);
  const int64_t score_fetches = pair_tiles(size) + kKeyBlocks;
  const int64_t sum_fetches = divided_up(stride, kColumns * kBlock) * (kKeyTile / kPairDepth);
  const int64_t row_size = tile.num_kv_heads * size;
  NextRows<BF16> values = {keys.keys + kKeyTile, 0, row_size, lines / score_fetches + 1},
                 next = {keys.keys + 2 * kKeyTile, 0, row_size, lines / sum_fetches + 1};
  const auto pack_kept = [&](uint64_t kept) {
    const HeadBlocks first = blocks_of(call, tile, 0, scratch);
    const auto pack = whole && kept == kAllSeen ? pack_values<true> : pack_values<false>;
    return pack(keys.keys + kKeyTile, kept, tile.num_kv_heads, size,
                kKeyTile * first.tiles * kPairDepth, first.values);
  };
  const bool in_place = whole && per_head <= kMostRowsInPlace && call.block_size % kBlock == 0;
  if (!in_place) {
    const auto pack_all = whole ? pack_keys<true> : pack_keys<false>;
    pack_all(keys, tile.num_kv_heads, size, blocks_of(call, tile, 0, scratch).keys);
  }
  for (int64_t head = 0; head < tile.num_kv_heads; ++head) {
    const HeadBlocks blocks = blocks_of(call, tile, head, scratch);
    const int64_t key_stride = in_place ? call.slot_stride : blocks.tiles * kPairDepth;
    const BF16* key_blocks[kKeyBlocks];
    for (int64_t n = 0; n < kKeyBlocks; ++n) {
      const int64_t key = n * kBlock;
      key_blocks[n] = in_place ? keys.keys[key] + head * size : blocks.keys + key * key_stride;
    }
    for (int64_t i = 0; i < per_head; i += kBlock) {
      const int64_t count = per_head - i < kBlock ? per_head - i : kBlock;
      const int64_t row = blocks.first_row + i;
      if (masked && !any_sees(scratch, i, count, group)) continue;
      score_block(blocks.queries + i / kBlock * blocks.tiles, key_blocks, key_stride, blocks.tiles,
                  count, scale, scratch.weights + row * kKeyTile, values);
      for (int64_t r = 0; r < count; ++r) {
        const uint64_t seen = masked ? scratch.seen[(i + r) / group] : kAllSeen;
        soften<masked>(scratch.weights + (row + r) * kKeyTile, seen, call.softcap, row + r, scratch,
                       state, stride);
      }
    }
  }
  const bool wild = pack_kept(bits_of(0, keys.size));
  if (!masked || !wild) {
    return sum_blocks<masked>(call, tile, 0, per_head, scratch, state, next);
  }
  // 0 times infinity is NaN, so each token gets zeros where it sees nothing.
  for (int64_t token = 0; token < tile.num_tokens; ++token) {
    pack_kept(scratch.seen[token]);
    sum_blocks<masked>(call, tile, token * group, (token + 1) * group, scratch, state, next);
  }
}

FASTSPEC_AMX void release_tiles() { _tile_release(); }

#else

void pack_queries(const AttentionCall&, const QueryTile&, const AttentionScratch&) {}
template <bool masked>
void attend_by_tiles(const AttentionCall&, const QueryTile&, const KeyTile<BF16>&,
                     const AttentionScratch&, const AttentionState&) {}
void configure_tiles() {}
void release_tiles() {}

#endif
