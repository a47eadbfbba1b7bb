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
  BF16 (*weights)[kKeyTile];           // of rows up to a multiple of 16
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
          reinterpret_cast<BF16*>(scratch.values) + head * size,
          reinterpret_cast<BF16(*)[kKeyTile]>(scratch.weights) + head * padded(num_rows)};
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

// Scores of a key tile, [key][row].
struct ScoreBlock {
  alignas(64) float of[kKeyTile][kBlock];
};

// Dot products of 16 rows with keys.
FASTSPEC_AMX void score_block(const PairTile* queries, const BF16* const* keys, int64_t key_stride,
                              int64_t tiles, ScoreBlock& scores, NextRows<BF16>& next) {
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
  _tile_stored(0, scores.of[0], 64);
  _tile_stored(1, scores.of[1 * kBlock], 64);
  _tile_stored(2, scores.of[2 * kBlock], 64);
  _tile_stored(3, scores.of[3 * kBlock], 64);
}

// What the rows of a block see of a key tile: words of each row's bits, 0 for rows it lacks.
struct RowsSeen {
  __m512i low, high;

  RowsSeen(const uint64_t* tokens, int64_t row, int64_t count, int64_t group) {
    alignas(64) uint32_t words[2][kBlock] = {};
    for (int64_t r = 0; r < count; ++r) {
      const uint64_t seen = tokens[(row + r) / group];
      words[0][r] = static_cast<uint32_t>(seen);
      words[1][r] = static_cast<uint32_t>(seen >> 32);
    }
    low = _mm512_load_si512(words[0]);
    high = _mm512_load_si512(words[1]);
  }

  // The lanes of `beside` whose row sees the key of their line.
  template <int parts>
  FASTSPEC_INLINE __mmask16 lanes(int64_t key, int64_t step) const {
    constexpr int kRows = kBlock / parts;
    uint32_t all = 0;
    for (int i = 0; i < parts; ++i, key += step) {
      const __m512i bit = _mm512_set1_epi32(static_cast<int32_t>(1u << key % 32));
      const uint32_t rows = _mm512_test_epi32_mask(key < 32 ? low : high, bit);
      all |= (rows & ((1u << kRows) - 1)) << i * kRows;
    }
    return static_cast<__mmask16>(all);
  }
};

// Combines lanes of one row by f, in the order of keys.
template <int parts, class F>
FASTSPEC_INLINE NativeF32 over_parts(NativeF32 x, const F& f) {
  constexpr std::make_integer_sequence<int, kNativeLanes> lanes;
  if constexpr (parts == 4) x = f(x, swap<kNativeLanes / 4>(x, lanes));
  if constexpr (parts >= 2) x = f(x, swap<kNativeLanes / 2>(x, lanes));
  return x;
}

// Like `soften` for `count` rows of a block, whose maxima and sums these are. Lanes are rows, the
// same ones for `parts` keys. Fills `decays`, the factors of their sums of values, and
// weights[row][key] in bfloat16. Keys are added in four groups of 16, whatever the parts.
template <bool masked, int parts>
FASTSPEC_AMX void soften_block(ScoreBlock& scores, const RowsSeen& seen, float scale, float softcap,
                               float* maxima, float* sums, float* decays, int64_t count,
                               BF16 (*weights)[kKeyTile], NextRows<BF16>& next) {
  constexpr int64_t kStep = kKeyTile / parts, kRows = kBlock / parts;
  const auto spread = [](NativeF32 x) FASTSPEC_INLINE_LAMBDA -> NativeF32 {
    return parts == 4   ? _mm512_shuffle_f32x4(x, x, 0)
           : parts == 2 ? _mm512_shuffle_f32x4(x, x, 0x44)
                        : __m512(x);
  };
  NativeF32 score[kStep], highest = native(kMinusInfinity);
  for (int64_t key = 0; key < kStep; ++key) {
    if (key % (kStep / kKeyBlocks) == 0) next.fetch();
    NativeF32 x = beside<parts>(scores.of + key, kStep) * scale;
    if (softcap > 0.0f) x = tanh(x) * (softcap * kLog2E);
    if constexpr (masked) {
      x = _mm512_mask_mov_ps(native(kMinusInfinity), seen.lanes<parts>(key, kStep), x);
    }
    score[key] = x;
    highest = _mm512_max_ps(x, highest);  // without NaN
  }
  finish_stores(score);  // or the product and a difference below might be rounded once
  const auto larger = [](NativeF32 a, NativeF32 b)
                          FASTSPEC_INLINE_LAMBDA -> NativeF32 { return _mm512_max_ps(a, b); };
  const __mmask16 rows = static_cast<__mmask16>((1u << count) - 1);
  const NativeF32 before = spread(_mm512_maskz_loadu_ps(rows, maxima));
  const NativeF32 raised = _mm512_max_ps(before, over_parts<parts>(highest, larger));
  const NativeF32 origin = raised == kMinusInfinity ? NativeF32{} : raised;
  const NativeF32 decay = exp2(before - origin);
  const __m512i interleaved = interleaved_halves();
  NativeF32 group_sums[kKeyBlocks] = {};
  for (int64_t first = 0; first < kStep; first += kPairDepth) {
    NativeF32 pairs[kBlock] = {};
    for (int64_t i = 0; i < kBlock && 2 * i < kStep; ++i) {
      const int64_t key = first + 2 * i;
      const NativeF32 even = exp2(score[key] - origin), odd = exp2(score[key + 1] - origin);
      NativeF32& sum = group_sums[key / kBlock];
      sum += even;
      sum += odd;
      const __m512bh both = _mm512_cvtne2ps_pbh(odd, even);
      pairs[i] =
          bit_cast<NativeF32>(_mm512_permutexvar_epi16(interleaved, bit_cast<__m512i>(both)));
    }
    transpose(pairs);
    constexpr int64_t kBytes = sizeof(BF16) * (kStep < kPairDepth ? kStep : kPairDepth);
#pragma GCC unroll 16
    for (int64_t i = 0; i < kBlock; ++i) {
      std::memcpy(weights[i % kRows] + i / kRows * kStep + first, &pairs[i], kBytes);
    }
  }
  if constexpr (parts == 1) {
    group_sums[0] += group_sums[1];
    group_sums[0] += group_sums[2] + group_sums[3];
  }
  if constexpr (parts == 2) group_sums[0] += group_sums[1];
  const auto plus = [](NativeF32 a, NativeF32 b) FASTSPEC_INLINE_LAMBDA { return a + b; };
  const NativeF32 added = over_parts<parts>(group_sums[0], plus);
  const NativeF32 sum = multiply_add(_mm512_maskz_loadu_ps(rows, sums), decay, added);
  _mm512_mask_storeu_ps(maxima, rows, raised);
  _mm512_mask_storeu_ps(sums, rows, sum);
  _mm512_mask_storeu_ps(decays, rows, decay);
}

// out[row][d] = out[row][d] * decay[row] + the sum over keys of weights[row][key] * values[key][d],
// for those of 16 rows whose bit is set.
FASTSPEC_AMX void sum_block(const BF16 (*weights)[kKeyTile], const float* decays, uint32_t rows,
                            const BF16* values, int64_t stride, float* out, NextRows<BF16>& next) {
  alignas(64) float sums[kBlock][kColumns * kBlock];
  finish_stores(weights);
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
      _tile_loadd(4, &weights[0][j], kKeyTile * sizeof(BF16));
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
    for (uint32_t left = rows; left != 0; left &= left - 1) {
      const int64_t r = __builtin_ctz(left);
      float* to = out + r * stride + d;
      for (int64_t i = 0; i < columns && i < kColumns; ++i) {
        const NativeF32 added = load_native(&sums[r][i * kBlock]);
        store_native(to + i * kBlock,
                     multiply_add(load_native(to + i * kBlock), native(decays[r]), added));
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
      uint32_t rows = (1u << count) - 1;
      for (int64_t r = 0; masked && r < count; ++r) {
        if (scratch.seen[(i + r) / group] == 0) rows &= ~(1u << r);
      }
      if (rows == 0) continue;
      sum_block(blocks.weights + i, scratch.lane_sums + row, rows, blocks.values, stride,
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
  ScoreBlock scores;
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
                  scores, values);
      const RowsSeen seen(scratch.seen, i, masked ? count : 0, group);
      with_parts(count, [&](auto parts) {
        soften_block<masked, parts.value>(scores, seen, scale, call.softcap, state.maximum + row,
                                          state.sum + row, scratch.lane_sums + row, count,
                                          blocks.weights + i, values);
      });
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
