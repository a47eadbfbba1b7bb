// Many rows against one KV head of a key tile: keys and values are packed once for all rows, as
// float32, and vector lanes are keys. Included by tree_attention.inl.

constexpr int64_t kLinesAtATime = 3;
constexpr int64_t kPanelKeys = kTileVectors * kNativeLanes;  // keys of a register tile
constexpr int kLaneBits = kNativeLanes == 16 ? 4 : kNativeLanes == 8 ? 3 : 2;

// The order in which sum_each adds lanes pairwise: by the reversed bits of their indices.
constexpr int place_of_lane(int lane) {
  int place = 0;
  for (int bit = 0; bit < kLaneBits; ++bit) place |= (lane >> bit & 1) << (kLaneBits - 1 - bit);
  return place;
}

// The vector of a row at d, zeros past its end.
template <class T>
FASTSPEC_INLINE NativeF32 load_within(const T* row, int64_t d, int64_t size) {
  if (d + kNativeLanes <= size) return load_native(row + d);
  return d < size ? load_rest(row + d, size - d) : NativeF32{};
}

// [panel of kPanelKeys keys][place of the lane d % kNativeLanes][d / kNativeLanes][key]
template <class T>
void pack_keys(const T* const* keys, int64_t first_dim, int64_t head_size, float* to) {
  const int64_t stride = padded(head_size), depth = stride / kNativeLanes;
  for (int64_t j = 0; j < kKeyTile; j += kNativeLanes) {
    float* panel = to + j / kPanelKeys * kPanelKeys * stride + j % kPanelKeys;
    for (int64_t k = 0; k < depth; ++k) {
      NativeF32 block[kNativeLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kNativeLanes; ++i) {
        block[i] = load_within(keys[j + i] + first_dim, k * kNativeLanes, head_size);
      }
      transpose(block);
#pragma GCC unroll 16
      for (int lane = 0; lane < kNativeLanes; ++lane) {
        store_native(panel + (place_of_lane(lane) * depth + k) * kPanelKeys, block[lane]);
      }
    }
  }
}

// Like score_rows, with the same bits, against one panel.
template <int rows, class T>
void score_panel(const float* queries, const float* panel, int64_t stride, float scale,
                 float* scores, NextRows<T>& next) {
  const int64_t depth = stride / kNativeLanes;
  NativeF32 sums[rows][kTileVectors], waiting[kLaneBits][rows][kTileVectors];
  for (int place = 0, num_waiting = 0; place < kNativeLanes; ++place) {
    const float* query = queries + place_of_lane(place);
    for (int r = 0; r < rows; ++r) {
      for (int v = 0; v < kTileVectors; ++v) sums[r][v] = NativeF32{};
    }
    for (int64_t k = 0; k < depth; ++k, query += kNativeLanes, panel += kPanelKeys) {
      NativeF32 key[kTileVectors];
      for (int v = 0; v < kTileVectors; ++v) key[v] = load_native(panel + v * kNativeLanes);
      for (int r = 0; r < rows; ++r) {
        const NativeF32 x = native(query[r * stride]);
        for (int v = 0; v < kTileVectors; ++v) sums[r][v] = multiply_add(x, key[v], sums[r][v]);
      }
    }
    next.fetch();
    for (int bits = place; (bits & 1) != 0; bits >>= 1) {
      --num_waiting;
      for (int r = 0; r < rows; ++r) {
        for (int v = 0; v < kTileVectors; ++v) sums[r][v] += waiting[num_waiting][r][v];
      }
    }
    if (place + 1 == kNativeLanes) break;
    for (int r = 0; r < rows; ++r) {
      for (int v = 0; v < kTileVectors; ++v) waiting[num_waiting][r][v] = sums[r][v];
    }
    ++num_waiting;
  }
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < kTileVectors; ++v) {
      store_native(scores + r * kKeyTile + v * kNativeLanes, sums[r][v] * scale);
    }
  }
}

template <class T>
constexpr decltype(&score_panel<1, T>) kScorePanel[kPackedRows] = {
    score_panel<1, T>, score_panel<2, T>, score_panel<3, T>,
    score_panel<4, T>, score_panel<5, T>, score_panel<6, T>};

// Calls f(first row, number of rows) for each register tile of a head.
template <class F>
FASTSPEC_INLINE void each_packed_tile(int64_t num_rows, const F& f) {
  for (int64_t i = 0; i < num_rows; i += kPackedRows) {
    f(i, num_rows - i < kPackedRows ? num_rows - i : kPackedRows);
  }
}

// The rows of one KV head of the tile, `head`, against one key tile.
template <bool masked, class T>
void attend_packed(const AttentionCall& call, const QueryTile& tile, int64_t head, KeyTile<T>& keys,
                   NextRows<T> next, const AttentionScratch& scratch, const AttentionState& state) {
  const int64_t group = call.num_heads / call.num_kv_heads, stride = padded(call.head_size);
  const int64_t num_rows = tile.num_rows / tile.num_kv_heads, first_row = head * num_rows;
  const int64_t first_dim = head * call.head_size;
  const float* queries = scratch.queries + first_row * stride;
  const float scale = scale_of_scores(call);
  float* out = state.value + first_row * stride;
  pack_keys(keys.keys, first_dim, call.head_size, scratch.keys);
  NextRows<T> values = {keys.values(), first_dim, call.head_size, kLinesAtATime};
  for (int64_t j = 0; j < keys.size; j += kPanelKeys) {
    each_packed_tile(num_rows, [&](int64_t row, int64_t count) {
      if (masked && !any_sees(scratch, row, count, group)) return;
      kScorePanel<T>[count - 1](queries + row* stride, scratch.keys + j* stride, stride, scale,
                                scratch.weights + row* kKeyTile + j, values);
    });
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    const uint64_t seen = masked ? scratch.seen[row / group] : kAllSeen;
    soften<masked>(scratch.weights + row * kKeyTile, seen, call.softcap, first_row + row, scratch,
                   state, stride);
  }
  const float* rows[kKeyTile];
  for (int64_t j = 0; j < keys.size; ++j) {
    float* to = scratch.values + j * stride;
    widen_row(values.rows[j] + first_dim, call.head_size, to);
    rows[j] = to;
  }
  each_packed_tile(num_rows, [&](int64_t row, int64_t count) {
    const float* weights = scratch.weights + row * kKeyTile;
    if constexpr (masked) {
      uint64_t seen[kPackedRows];
      for (int64_t r = 0; r < count; ++r) seen[r] = scratch.seen[(row + r) / group];
      add_seen_values<false>(weights, rows, seen, count, 0, stride, out + row * stride);
    } else {
      for (int64_t j = 0; j < kKeyTile; j += kKeyStep) {
        next.fetch();
        kSumRows<false, float>[count - 1](weights, rows, {j, j + kKeyStep}, 0, stride,
                                          out + row* stride);
      }
    }
  });
}
