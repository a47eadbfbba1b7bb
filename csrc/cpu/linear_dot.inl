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

  template <int rows, int outputs>
  __attribute__((target("avx512bf16"))) static void multiply(const BF16* input, int64_t stride,
                                                             const BF16* weight, int64_t depth,
                                                             Ahead ahead, NativeF32* sums) {
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
  template <int rows, int outputs>
  __attribute__((target("avx512bf16"))) FASTSPEC_INLINE static void add(
      const BF16* input, int64_t stride, const BF16* weight, int64_t depth, __mmask32 mask,
      Ahead ahead, __m512 (&sums)[rows][outputs]) {
    __m512bh weights[outputs];
#pragma GCC unroll 4
    for (int n = 0; n < outputs; ++n) {
      ahead.fetch<rows, outputs>(weight + n * depth, n);
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

// The weights of up to 16 outputs times 16 * blocks rows. Tile 4 is for weights, 5 to 7 for rows.
template <int blocks>
FASTSPEC_AMX void multiply_blocks(const BF16* weight, int64_t outputs, int64_t depth,
                                  const PairTile* rows, TileSums* sums) {
  const int64_t tiles = pair_tiles(depth);
  _tile_zero(0);
  if constexpr (blocks > 1) _tile_zero(1);
  if constexpr (blocks > 2) _tile_zero(2);
  if constexpr (blocks > 3) _tile_zero(3);
  for (int64_t tile = 0; tile < tiles; ++tile, ++rows) {
    const BF16* from = weight + tile * kPairDepth;
    const int64_t left = depth - tile * kPairDepth;
    if (outputs == kOutputTile && left >= kPairDepth) {
      // The same place of the next 16 outputs.
      for (int64_t n = 0; n < kOutputTile; ++n) {
        __builtin_prefetch(from + (kOutputTile + n) * depth, 0, 2);
      }
      _tile_loadd(4, from, depth * sizeof(BF16));
    } else {
      BF16 copy[kOutputTile][kPairDepth] = {};
      const int64_t count = left < kPairDepth ? left : kPairDepth;
      for (int64_t n = 0; n < outputs; ++n) {
        std::memcpy(copy[n], from + n * depth, count * sizeof(BF16));
      }
      finish_stores(copy);
      _tile_loadd(4, copy, 64);
    }
    _tile_loadd(5, rows, 64);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (blocks > 1) {
      _tile_loadd(6, rows + tiles, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (blocks > 2) {
      _tile_loadd(7, rows + 2 * tiles, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (blocks > 3) {
      _tile_loadd(5, rows + 3 * tiles, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, sums[0].of, 64);
  if constexpr (blocks > 1) _tile_stored(1, sums[1].of, 64);
  if constexpr (blocks > 2) _tile_stored(2, sums[2].of, 64);
  if constexpr (blocks > 3) _tile_stored(3, sums[3].of, 64);
}

FASTSPEC_AMX void multiply_tiles(const PackedRows& packed, const Product& product, int64_t first,
                                 int64_t last) {
  constexpr int64_t kMostBlocks = 4;
  const BF16* weight = static_cast<const BF16*>(product.weight);
  const PairTile* rows = static_cast<const PairTile*>(packed.data);
  const int64_t depth = packed.depth, all = row_blocks(packed.num_rows);
  TileSums sums[kMostBlocks];
  configure_tiles();
  for (int64_t n = first; n < last; n += kOutputTile) {
    const int64_t outputs = last - n < kOutputTile ? last - n : kOutputTile;
    for (int64_t block = 0; block < all; block += kMostBlocks) {
      const int64_t blocks = all - block < kMostBlocks ? all - block : kMostBlocks;
      const auto run = blocks == 1   ? multiply_blocks<1>
                       : blocks == 2 ? multiply_blocks<2>
                       : blocks == 3 ? multiply_blocks<3>
                                     : multiply_blocks<4>;
      run(weight + n * depth, outputs, depth, rows + block * pair_tiles(depth), sums);
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t row = (block + b) * kTileRowsOfAmx, left = packed.num_rows - row;
        write_tile(product, sums[b].of, row, left < kTileRowsOfAmx ? left : kTileRowsOfAmx, n,
                   outputs, packed.element);
      }
    }
  }
  _tile_release();
}

#else

void multiply_tiles(const PackedRows&, const Product&, int64_t, int64_t) {}

#endif
