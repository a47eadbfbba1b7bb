// Products of bfloat16 rows and weights by AVX512-BF16 and by AMX tiles. Included by linear.inl.

template <class T>
void narrow_row(const T* from, int64_t size, int64_t padded_size, BF16* to) {
  if constexpr (std::is_same_v<T, BF16>) {
    std::memcpy(to, from, size * sizeof(T));
  } else {
    convert_row(from, size, to);
  }
  std::memset(to + size, 0, (padded_size - size) * sizeof(BF16));
}

#if defined(__AVX512F__) && FASTSPEC_COMPILES_BFLOAT16

// Like WideTiles, for bfloat16 rows, zero-padded to a multiple of kPairDepth.
struct PairTiles {
  // See WideTiles; here two rows also keep up with memory in its own order, however long they are.
  template <int rows>
  static constexpr int kOutputs = rows <= 2   ? 1
                                  : rows == 3 ? 2
                                              : 4;

  template <int rows, int outputs, class Prefetch>
  __attribute__((target("avx512bf16"))) static void multiply(const BF16* input, int64_t stride,
                                                             const BF16* weight, int64_t depth,
                                                             Prefetch ahead, NativeF32* sums) {
    const int64_t whole = depth / kPairDepth * kPairDepth;
    __m512 own[rows][outputs] = {};
    for (int64_t k = 0; k < whole; k += kPairDepth) {
      add(input + k, stride, weight + k, depth, ~__mmask32{0}, ahead, own);
    }
    if (whole < depth) {
      add(input + whole, stride, weight + whole, depth, (1u << (depth - whole)) - 1, ahead, own);
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) {
      NativeF32 row[outputs];
#pragma GCC unroll 4
      for (int n = 0; n < outputs; ++n) row[n] = bit_cast<NativeF32>(own[r][n]);
      sums[r * kNativeLanes] = sum_some<outputs>(row);
    }
  }

 private:
  template <int rows, int outputs, class Prefetch>
  __attribute__((target("avx512bf16"))) FASTSPEC_INLINE static void add(
      const BF16* input, int64_t stride, const BF16* weight, int64_t depth, __mmask32 mask,
      Prefetch ahead, __m512 (&sums)[rows][outputs]) {
    __m512bh weights[outputs];
#pragma GCC unroll 4
    for (int n = 0; n < outputs; ++n) {
      ahead.template fetch<rows, outputs>(weight + n * depth, n);
      weights[n] = bit_cast<__m512bh>(_mm512_maskz_loadu_epi16(mask, weight + n * depth));
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) {
      const __m512bh x = bit_cast<__m512bh>(_mm512_loadu_si512(input + r * stride));
#pragma GCC unroll 4
      for (int n = 0; n < outputs; ++n) sums[r][n] = _mm512_dpbf16_ps(sums[r][n], x, weights[n]);
    }
  }
};

void multiply_pairs(const PackedRows& rows, const Product& product, int64_t first, int64_t last) {
  multiply_tiles_of<PairTiles>(rows, product, static_cast<const BF16*>(rows.data),
                               static_cast<const BF16*>(product.weight),
                               pair_tiles(rows.depth) * kPairDepth, first, last);
}

#else

void multiply_pairs(const PackedRows&, const Product&, int64_t, int64_t) {}

#endif

#if defined(__AVX512F__) && FASTSPEC_COMPILES_AMX

// The first `count` of 32 values, then zeros, as bfloat16.
template <class T>
FASTSPEC_AMX FASTSPEC_INLINE NativeF32 narrow_some(const T* from, int64_t count) {
  const __mmask32 mask = count < kPairDepth ? (1u << count) - 1 : ~0u;
  if constexpr (std::is_same_v<T, BF16>) {
    return bit_cast<NativeF32>(_mm512_maskz_loadu_epi16(mask, from));
  } else {
    const auto load_half = [](const T* half, __mmask16 kept) FASTSPEC_INLINE_LAMBDA {
      if constexpr (std::is_same_v<T, F16>) {
        return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(kept, half));
      } else {
        return _mm512_maskz_loadu_ps(kept, half);
      }
    };
    const __m512 low = load_half(from, static_cast<__mmask16>(mask));
    const __m512 high = load_half(from + kPairDepth / 2, static_cast<__mmask16>(mask >> 16));
    return bit_cast<NativeF32>(_mm512_cvtne2ps_pbh(high, low));
  }
}

// Up to 16 rows of `depth` values; the lanes of missing ones are zeros.
template <class T>
FASTSPEC_AMX void pack_block(const T* const* rows, int64_t count, int64_t depth, PairTile* tile) {
  for (int64_t k = 0; k < depth; k += kPairDepth, ++tile) {
    NativeF32 pairs[kTileRowsOfAmx];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kTileRowsOfAmx; ++i) {
      pairs[i] = i < count ? narrow_some(rows[i] + k, depth - k) : NativeF32{};
    }
    transpose(pairs);
#pragma GCC unroll 16
    for (int64_t i = 0; i < kTileRowsOfAmx; ++i) {
      std::memcpy(tile->pairs[i], &pairs[i], sizeof(pairs[i]));
    }
  }
}

// Rows first..last of [num_rows, depth]; `first` starts a block.
template <class T>
void pack_blocks(const T* from, const PackedRows& packed, int64_t first, int64_t last) {
  PairTile* tiles = static_cast<PairTile*>(packed.data);
  for (int64_t row = first; row < last; row += kTileRowsOfAmx) {
    const int64_t count = last - row < kTileRowsOfAmx ? last - row : kTileRowsOfAmx;
    const T* rows[kTileRowsOfAmx];
    for (int64_t i = 0; i < count; ++i) rows[i] = from + (row + i) * packed.depth;
    pack_block(rows, count, packed.depth, tiles + row / kTileRowsOfAmx * pair_tiles(packed.depth));
  }
}

// Writes sums[output][row] of a tile, plus the bias, to the output's columns from n on.
FASTSPEC_INLINE void write_tile(const Product& product, const float (*sums)[kTileRowsOfAmx],
                                int64_t row, int64_t rows, int64_t n, int64_t outputs,
                                Element weights) {
  static_assert(kNativeLanes == kOutputTile && kNativeLanes == kTileRowsOfAmx);
  float bias[kOutputTile] = {};
  if (product.bias != nullptr) {
    with_type(weights, [&](auto type) {
      const auto* from = static_cast<decltype(type)>(product.bias) + n;
      for (int64_t i = 0; i < outputs; ++i) bias[i] = load_one(from + i);
    });
  }
  with_type(product.out_element, [&](auto type) {
    using Out = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
    Out* out = static_cast<Out*>(product.out) + row * product.num_outputs + n;
    if (outputs < kOutputTile) {
      for (int64_t r = 0; r < rows; ++r, out += product.num_outputs) {
        for (int64_t i = 0; i < outputs; ++i) convert(sums[i][r] + bias[i], out + i);
      }
      return;
    }
    NativeF32 columns[kNativeLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kNativeLanes; ++i) columns[i] = load_native(sums[i]);
    transpose(columns);
    const NativeF32 added = load_native(bias);
#pragma GCC unroll 16
    for (int r = 0; r < kNativeLanes; ++r) {
      if (r < rows) store_native(out + r * product.num_outputs, columns[r] + added);
    }
  });
}

struct TileSums {
  float of[kOutputTile][kTileRowsOfAmx];
};

// Where a register tile of weights is read, and the distance between its outputs.
struct WeightTile {
  const BF16* from;
  int64_t bytes;
};

// The first `outputs` outputs, `stride` values apart, with `left` values each; a tile that lacks
// outputs or values is copied.
FASTSPEC_INLINE WeightTile weight_tile(const BF16* weight, int64_t stride, int64_t outputs,
                                       int64_t left, BF16 (*copy)[kPairDepth]) {
  if (outputs >= kOutputTile && left >= kPairDepth) {
    return {weight, stride * static_cast<int64_t>(sizeof(BF16))};
  }
  const int64_t count = left < kPairDepth ? left : kPairDepth;
  std::memset(copy, 0, kOutputTile * sizeof(*copy));
  for (int64_t n = 0; n < outputs && n < kOutputTile; ++n) {
    std::memcpy(copy[n], weight + n * stride, count * sizeof(BF16));
  }
  finish_stores(copy);
  return {copy[0], sizeof(*copy)};
}

constexpr int kMostTiles = 2;  // of outputs, and of rows, that are multiplied together

// Up to 16 outputs, whose weights are `depth` values apart.
struct OutputTile {
  const BF16* weight;
  int64_t outputs;
};

// 1 or 2 tiles of outputs times 1 or 2 blocks of 16 rows: sums[tile * kMostTiles + block]. Weights
// of the outputs `ahead` after these are prefetched, unless it is 0. Register tiles 0 to 3 are for
// sums, 4 and 5 for weights, 6 and 7 for rows.
template <int tiles, int blocks>
FASTSPEC_AMX void multiply_blocks(const OutputTile* outputs, int64_t depth, const PairTile* rows,
                                  int64_t ahead, TileSums* sums) {
  const int64_t steps = pair_tiles(depth);
  BF16 copies[tiles][kOutputTile][kPairDepth];
  _tile_zero(0);
  if constexpr (blocks > 1) _tile_zero(1);
  if constexpr (tiles > 1) _tile_zero(2);
  if constexpr (tiles > 1 && blocks > 1) _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step, ++rows) {
    const int64_t k = step * kPairDepth, left = depth - k;
    if (ahead > 0 && outputs[tiles - 1].outputs == kOutputTile && left >= kPairDepth) {
      for (int tile = 0; tile < tiles; ++tile) {
        for (int64_t n = ahead; n < ahead + kOutputTile; ++n) {
          __builtin_prefetch(outputs[tile].weight + n * depth + k, 0, 2);
        }
      }
    }
    const auto tile_of = [&](int tile) FASTSPEC_INLINE_LAMBDA {
      const OutputTile& of = outputs[tile];
      return weight_tile(of.weight + k, depth, of.outputs, left, copies[tile]);
    };
    const WeightTile first = tile_of(0);
    _tile_loadd(4, first.from, first.bytes);
    _tile_loadd(6, rows, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (blocks > 1) {
      _tile_loadd(7, rows + steps, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (tiles > 1) {
      const WeightTile second = tile_of(1);
      _tile_loadd(5, second.from, second.bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (blocks > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0].of, 64);
  if constexpr (blocks > 1) _tile_stored(1, sums[1].of, 64);
  if constexpr (tiles > 1) _tile_stored(2, sums[2].of, 64);
  if constexpr (tiles > 1 && blocks > 1) _tile_stored(3, sums[3].of, 64);
}

FASTSPEC_AMX void multiply_tiles(const PackedRows& packed, const Product& product, int64_t first,
                                 int64_t last) {
  const BF16* weight = static_cast<const BF16*>(product.weight);
  const PairTile* rows = static_cast<const PairTile*>(packed.data);
  const int64_t depth = packed.depth, all = row_blocks(packed.num_rows);
  const int64_t most_outputs = outputs_of_task(packed);
  TileSums sums[kMostTiles * kMostTiles];
  configure_tiles();
  for (int64_t n = first; n < last; n += most_outputs) {
    const int64_t outputs = last - n < most_outputs ? last - n : most_outputs;
    const bool two_tiles = outputs > kOutputTile;
    const OutputTile tiles[kMostTiles] = {
        {weight + n * depth, two_tiles ? kOutputTile : outputs},
        {weight + (n + kOutputTile) * depth, outputs - kOutputTile}};
    for (int64_t block = 0; block < all; block += kMostTiles) {
      const bool two_blocks = all - block > 1;
      const auto run = two_tiles    ? two_blocks ? multiply_blocks<2, 2> : multiply_blocks<2, 1>
                       : two_blocks ? multiply_blocks<1, 2>
                                    : multiply_blocks<1, 1>;
      run(tiles, depth, rows + block * pair_tiles(depth), block == 0 ? most_outputs : 0, sums);
      for (int64_t i = 0; i < kMostTiles * kMostTiles; ++i) {
        const int64_t output = i / kMostTiles * kOutputTile;
        const int64_t row = (block + i % kMostTiles) * kTileRowsOfAmx;
        const int64_t columns = outputs - output, count = packed.num_rows - row;
        if (columns <= 0 || count <= 0) continue;
        write_tile(product, sums[i].of, row, count < kTileRowsOfAmx ? count : kTileRowsOfAmx,
                   n + output, columns < kOutputTile ? columns : kOutputTile, packed.element);
      }
    }
  }
  _tile_release();
}

// f(gates) * ups in pairs of outputs: lines of sums are outputs, so nothing is transposed.
template <int parts, class F>
FASTSPEC_AMX void gate_pairs(const TileSums& gates, const TileSums& ups, const F& f,
                             BF16 (*pairs)[kTileRowsOfAmx][2]) {
  constexpr int64_t kStep = kOutputTile / parts;
  const __m512i interleaved = interleaved_halves();
  const auto gated = [&](int64_t output) FASTSPEC_INLINE_LAMBDA {
    return f(beside<parts>(gates.of + output, kStep)) * beside<parts>(ups.of + output, kStep);
  };
  for (int64_t n = 0; n < kStep; n += 2) {
    const __m512bh both = _mm512_cvtne2ps_pbh(gated(n + 1), gated(n));
    const __m512i pair = _mm512_permutexvar_epi16(interleaved, bit_cast<__m512i>(both));
    for (int64_t i = 0; i < parts; ++i) {
      constexpr int64_t kBytes = sizeof(pair) / parts;
      std::memcpy(pairs[(i * kStep + n) / 2], reinterpret_cast<const char*>(&pair) + i * kBytes,
                  kBytes);
    }
  }
}

// Packs outputs from n on of a block of rows, and the zeros after the last. Lanes past the last row
// are arbitrary: each sum of a tile is of one row, and theirs are dropped.
void pack_gated(const TileSums& gates, const TileSums& ups, Activation activation,
                const PackedRows& out, int64_t block, int64_t n) {
  PairTile* tile =
      static_cast<PairTile*>(out.data) + block * pair_tiles(out.depth) + n / kPairDepth;
  const int64_t first = n % kPairDepth, end = out.depth - n + first;
  with_parts(out.num_rows - block * kTileRowsOfAmx, [&](auto parts) {
    with_activation(activation, [&](auto f) {
      gate_pairs<parts.value>(gates, ups, f, tile->pairs + first / 2);
    });
  });
  if (n + kOutputTile < out.depth) return;
  for (int64_t output = end; output < kPairDepth; ++output) {  // NaN, if a row is infinite
    for (auto& pair : tile->pairs[output / 2]) pair[output % 2] = {};
  }
}

// A few rows, which read long runs of either weights.
FASTSPEC_AMX void multiply_gated_rows(const PackedRows& packed, const GatedProduct& product,
                                      const PackedRows& out, int64_t first, int64_t last) {
  constexpr int64_t kRun = 8;  // tiles
  const PairTile* rows = static_cast<const PairTile*>(packed.data);
  const int64_t depth = packed.depth;
  TileSums gates[kRun], ups;
  for (int64_t n = first; n < last; n += kRun * kOutputTile) {
    const int64_t left = divided_up(last - n, kOutputTile), tiles = left < kRun ? left : kRun;
    const auto run = [&](const void* weight, int64_t tile, TileSums* sums) {
      const int64_t at = n + tile * kOutputTile, outputs = last - at;
      const OutputTile of = {static_cast<const BF16*>(weight) + at * depth,
                             outputs < kOutputTile ? outputs : kOutputTile};
      multiply_blocks<1, 1>(&of, depth, rows, kOutputTile, sums);
    };
    for (int64_t i = 0; i < tiles; ++i) run(product.gate, i, &gates[i]);
    for (int64_t i = 0; i < tiles; ++i) {
      run(product.up, i, &ups);
      pack_gated(gates[i], ups, product.activation, out, 0, n + i * kOutputTile);
    }
  }
}

FASTSPEC_AMX void multiply_gated_blocks(const PackedRows& packed, const GatedProduct& product,
                                        const PackedRows& out, int64_t first, int64_t last) {
  const PairTile* rows = static_cast<const PairTile*>(packed.data);
  const int64_t depth = packed.depth, all = row_blocks(packed.num_rows);
  TileSums sums[kMostTiles * kMostTiles];
  for (int64_t n = first; n < last; n += kOutputTile) {
    const int64_t outputs = last - n < kOutputTile ? last - n : kOutputTile;
    const OutputTile tiles[kMostTiles] = {
        {static_cast<const BF16*>(product.gate) + n * depth, outputs},
        {static_cast<const BF16*>(product.up) + n * depth, outputs}};
    for (int64_t block = 0; block < all; block += kMostTiles) {
      const int64_t blocks = all - block > 1 ? 2 : 1;
      const auto run = blocks > 1 ? multiply_blocks<2, 2> : multiply_blocks<2, 1>;
      run(tiles, depth, rows + block * pair_tiles(depth), block == 0 ? kOutputTile : 0, sums);
      for (int64_t i = 0; i < blocks; ++i) {
        pack_gated(sums[i], sums[kMostTiles + i], product.activation, out, block + i, n);
      }
    }
  }
}

FASTSPEC_AMX void multiply_gated_tiles(const PackedRows& packed, const GatedProduct& product,
                                       const PackedRows& out, int64_t first, int64_t last) {
  configure_tiles();
  const bool few = packed.num_rows <= kTileRowsOfAmx;
  (few ? multiply_gated_rows : multiply_gated_blocks)(packed, product, out, first, last);
  _tile_release();
}

#else

template <class T>
void pack_blocks(const T*, const PackedRows&, int64_t, int64_t) {}
void multiply_tiles(const PackedRows&, const Product&, int64_t, int64_t) {}
void multiply_gated_tiles(const PackedRows&, const GatedProduct&, const PackedRows&, int64_t,
                          int64_t) {}

#endif
