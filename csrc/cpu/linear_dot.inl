// Products of bfloat16 rows and weights by AVX512-BF16 and by AMX tiles. Included by linear.inl.

FASTSPEC_INLINE BF16 narrow(BF16 x) { return x; }

FASTSPEC_INLINE BF16 narrow(float x) {
  BF16 y;
  convert(x, &y);
  return y;
}

FASTSPEC_INLINE BF16 narrow(F16 x) { return narrow(load_one(&x)); }

template <class T>
void narrow_row(const T* from, int64_t size, int64_t padded_size, BF16* to) {
  for (int64_t k = 0; k < size; ++k) to[k] = narrow(from[k]);
  std::memset(to + size, 0, (padded_size - size) * sizeof(BF16));
}

// Lanes past the last row are arbitrary: each sum of a tile is of one row, and theirs are dropped.
template <class T>
void pack_pairs(const T* from, const PackedRows& rows, int64_t row) {
  PairTile* tile =
      static_cast<PairTile*>(rows.data) + row / kTileRowsOfAmx * pair_tiles(rows.depth);
  const int64_t lane = row % kTileRowsOfAmx;
  for (int64_t k = 0; k < rows.depth; k += kPairDepth, ++tile) {
    BF16 values[kPairDepth] = {};
    if (rows.depth - k >= kPairDepth) {
      for (int64_t i = 0; i < kPairDepth; ++i) values[i] = narrow(from[k + i]);
    } else {
      for (int64_t i = 0; i < rows.depth - k; ++i) values[i] = narrow(from[k + i]);
    }
    for (int64_t i = 0; i < kPairDepth / 2; ++i) {
      std::memcpy(tile->pairs[i][lane], values + 2 * i, 2 * sizeof(BF16));
    }
  }
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

// The weights of `outputs` outputs, in 1 or 2 tiles, times 1 or 2 blocks of 16 rows. Tiles 0 to 3
// are for sums, 4 and 5 for weights, 6 and 7 for rows.
template <int tiles, int blocks>
FASTSPEC_AMX void multiply_blocks(const BF16* weight, int64_t outputs, int64_t depth,
                                  const PairTile* rows, bool prefetches, TileSums* sums) {
  const int64_t steps = pair_tiles(depth);
  BF16 copies[tiles][kOutputTile][kPairDepth];
  _tile_zero(0);
  if constexpr (blocks > 1) _tile_zero(1);
  if constexpr (tiles > 1) _tile_zero(2);
  if constexpr (tiles > 1 && blocks > 1) _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step, ++rows) {
    const BF16* from = weight + step * kPairDepth;
    const int64_t left = depth - step * kPairDepth;
    if (prefetches && outputs == tiles * kOutputTile && left >= kPairDepth) {
      // The same place of the next outputs.
      for (int64_t n = 0; n < tiles * kOutputTile; ++n) {
        __builtin_prefetch(from + (tiles * kOutputTile + n) * depth, 0, 2);
      }
    }
    const WeightTile first = weight_tile(from, depth, outputs, left, copies[0]);
    _tile_loadd(4, first.from, first.bytes);
    _tile_loadd(6, rows, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (blocks > 1) {
      _tile_loadd(7, rows + steps, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (tiles > 1) {
      const WeightTile second =
          weight_tile(from + kOutputTile * depth, depth, outputs - kOutputTile, left, copies[1]);
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
    for (int64_t block = 0; block < all; block += kMostTiles) {
      const bool two_blocks = all - block > 1;
      const auto run = two_tiles    ? two_blocks ? multiply_blocks<2, 2> : multiply_blocks<2, 1>
                       : two_blocks ? multiply_blocks<1, 2>
                                    : multiply_blocks<1, 1>;
      run(weight + n * depth, outputs, depth, rows + block * pair_tiles(depth), block == 0, sums);
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

#else

void multiply_tiles(const PackedRows&, const Product&, int64_t, int64_t) {}

#endif
