// Products with quantized weights: rows are quantized too, the sums over half a block are exact
// integers, and these are scaled and added in float32, in order. Included by linear.inl.

// Part of a row; values are rounded multiples of the scale of their half.
struct RowBlock {
  int8_t values[kBlockDepth];
  float scales[2];
  int32_t sums[2];  // of the values
};

FASTSPEC_INLINE NativeI32 native(int32_t value) { return value - NativeI32{}; }

// Rounds to nearest even.
FASTSPEC_INLINE NativeI32 rounded(NativeF32 x) {
#if defined(__AVX512F__)
  return bit_cast<NativeI32>(_mm512_cvtps_epi32(x));
#elif defined(__AVX2__)
  return bit_cast<NativeI32>(_mm256_cvtps_epi32(x));
#else
  NativeI32 out;
  for (int i = 0; i < kNativeLanes; ++i) out[i] = static_cast<int32_t>(std::nearbyint(x[i]));
  return out;
#endif
}

// Values first..last of a row; `first` starts a block. A row with a value that is not finite gets
// scales that are NaN, and so does its output.
template <class T>
void quantize_row(const T* from, const PackedRows& rows, int64_t row, int64_t first, int64_t last) {
  constexpr int64_t kHalf = kBlockDepth / 2;
  constexpr float kLeast = 1e-30f;  // smaller halves are zero, because 127 / kLeast is finite
  typedef int8_t NativeI8 __attribute__((vector_size(kNativeLanes)));
  RowBlock* block =
      static_cast<RowBlock*>(rows.data) + row * depth_blocks(rows.depth) + first / kBlockDepth;
  for (int64_t k = first; k < last; k += kBlockDepth, ++block) {
    for (int64_t half = 0; half < 2; ++half) {
      float x[kHalf];
      NativeU32 magnitudes = {};
      for (int64_t i = 0; i < kHalf; i += kNativeLanes) {
        const int64_t at = k + half * kHalf + i, left = last - at;
        NativeF32 values = {};
        if (left > 0) {
          values = left < kNativeLanes ? load_rest(from + at, left) : load_native(from + at);
        }
        const NativeU32 bits = bit_cast<NativeU32>(values) & 0x7fffffffu;
        magnitudes = bits > magnitudes ? bits : magnitudes;
        store_native(x + i, values);
      }
      uint32_t most_bits = 0;
      for (int i = 0; i < kNativeLanes; ++i) {
        most_bits = magnitudes[i] > most_bits ? magnitudes[i] : most_bits;
      }
      const float most = bit_cast<float>(most_bits);
      const bool is_finite = most_bits < 0x7f800000u, is_zero = most < kLeast;
      const NativeF32 inverse = native(is_finite && !is_zero ? 127.0f / most : 0.0f);
      NativeI32 sums = {};
      for (int64_t i = 0; i < kHalf; i += kNativeLanes) {
        const NativeI32 values = is_finite ? rounded(load_native(x + i) * inverse) : NativeI32{};
        const NativeI8 bytes = __builtin_convertvector(values, NativeI8);
        std::memcpy(block->values + half * kHalf + i, &bytes, sizeof(bytes));
        sums += values;
      }
      int32_t sum = 0;
      for (int i = 0; i < kNativeLanes; ++i) sum += sums[i];
      block->sums[half] = sum;
      block->scales[half] = !is_finite ? kInfinity - kInfinity : is_zero ? 0.0f : most / 127.0f;
    }
  }
}

// Adds the products of 4 values with bytes 4 n to 4 n + 3 of the weights to lane n.
struct PairProducts {
  static constexpr bool kTakesSigned = true;  // weights of 8 bits are signed; 4 bits are not

  template <bool is_signed>
  FASTSPEC_INLINE static NativeI32 add(NativeI32 sums, NativeI32 weights, const int8_t* values) {
    int32_t quad;
    std::memcpy(&quad, values, sizeof(quad));
#if defined(__AVX512F__)
    const __m512i x = _mm512_set1_epi32(quad), w = bit_cast<__m512i>(weights);
    __m512i pairs;  // at most 2 * 128 * 127
    if constexpr (is_signed) {
      const __mmask64 is_negative = _mm512_movepi8_mask(w);
      const __m512i turned = _mm512_mask_sub_epi8(x, is_negative, _mm512_setzero_si512(), x);
      pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), turned);
    } else {
      pairs = _mm512_maddubs_epi16(w, x);
    }
    return sums + bit_cast<NativeI32>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#elif defined(__AVX2__)
    const __m256i x = _mm256_set1_epi32(quad), w = bit_cast<__m256i>(weights);
    __m256i pairs;  // at most 2 * 128 * 127
    if constexpr (is_signed) {
      pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    } else {
      pairs = _mm256_maddubs_epi16(w, x);
    }
    return sums + bit_cast<NativeI32>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#else
    for (int i = 0; i < 4; ++i) {  // byte i is the lowest but i, as on every supported processor
      const NativeI32 bytes = weights << (24 - 8 * i);
      const NativeI32 part = is_signed ? bytes >> 24 : (bytes >> 24) & 0xff;
      sums += part * native(static_cast<int32_t>(values[i]));
    }
    return sums;
#endif
  }
};

#if defined(__AVX512F__)

struct ByteProducts {
  static constexpr bool kTakesSigned = false;

  template <bool is_signed>
  FASTSPEC_INLINE static NativeI32 add(NativeI32 sums, NativeI32 weights, const int8_t* values) {
    // Not an intrinsic, which only functions compiled for AVX512-VNNI may inline.
    const auto* quad = reinterpret_cast<const char (*)[4]>(values);
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(weights), "m"(*quad));
    return sums;
  }
};

#endif

// Multiplies rows, `stride` blocks apart, by a tile of weights: sums[row][output].
template <int bits, class Products, int rows>
void multiply_quantized_tile(const RowBlock* row, int64_t stride, const char* weight,
                             int64_t blocks, NativeF32 (*sums)[kParts]) {
  static_assert(kOutputTile == kParts * kNativeLanes);
  constexpr int kQuads = kBlockDepth / 8;  // of half a block
  constexpr int64_t kQuadBytes = kOutputTile * 4;
  constexpr int64_t kBlockBytes = block_bytes(bits == 4 ? Element::kInt4 : Element::kInt8);
  constexpr int kZero = bits == 4 ? 8 : 128;
  constexpr bool is_signed = bits == 8 && Products::kTakesSigned;
  for (int r = 0; r < rows; ++r) {
    for (int part = 0; part < kParts; ++part) sums[r][part] = NativeF32{};
  }
  for (int64_t block = 0; block < blocks; ++block, ++row) {
    const BF16* scales = reinterpret_cast<const BF16*>(weight);
    const char* quads = weight + kScaleBytes;
    weight += kBlockBytes;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        NativeI32 dots[rows];
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
          dots[r] = native(is_signed ? 0 : -kZero * row[r * stride].sums[half]);
        }
#pragma GCC unroll 8
        for (int quad = 0; quad < kQuads; ++quad) {
          const int64_t place = bits == 4 ? quad : half * kQuads + quad;
          NativeI32 weights;
          std::memcpy(&weights, quads + place * kQuadBytes + part * kNativeLanes * 4,
                      sizeof(weights));
          if constexpr (bits == 4) weights = (half == 0 ? weights : weights >> 4) & 0x0f0f0f0f;
          if constexpr (is_signed) weights ^= static_cast<int32_t>(0x80808080u);
#pragma GCC unroll 4
          for (int r = 0; r < rows; ++r) {
            const int8_t* values = row[r * stride].values + half * kBlockDepth / 2 + quad * 4;
            dots[r] = Products::template add<is_signed>(dots[r], weights, values);
          }
        }
        const NativeF32 scale = widen(scales + half * kOutputTile + part * kNativeLanes);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
          const NativeF32 whole = __builtin_convertvector(dots[r], NativeF32);
          sums[r][part] = multiply_add(whole, scale * row[r * stride].scales[half], sums[r][part]);
        }
      }
    }
  }
}

template <int bits, class Products>
void multiply_quantized_by(const PackedRows& packed, const Product& product, int64_t first,
                           int64_t last) {
  constexpr int kMostRows = 4;
  const int64_t blocks = depth_blocks(packed.depth);
  const int64_t tile_bytes = blocks * block_bytes(packed.element);
  for (int64_t n = first; n < last; n += kOutputTile) {
    const char* weight = static_cast<const char*>(product.weight) + n / kOutputTile * tile_bytes;
    for (int64_t row = 0; row < packed.num_rows; row += kMostRows) {
      const RowBlock* from = static_cast<const RowBlock*>(packed.data) + row * blocks;
      const int64_t left = packed.num_rows - row, count = left < kMostRows ? left : kMostRows;
      const auto run = count == 1   ? multiply_quantized_tile<bits, Products, 1>
                       : count == 2 ? multiply_quantized_tile<bits, Products, 2>
                       : count == 3 ? multiply_quantized_tile<bits, Products, 3>
                                    : multiply_quantized_tile<bits, Products, 4>;
      NativeF32 sums[kMostRows][kParts];
      run(from, blocks, weight, blocks, sums);
      for (int64_t r = 0; r < count; ++r) {
        for (int part = 0; part < kParts; ++part) {
          const int64_t at = n + part * kNativeLanes, outputs = last - at;
          if (outputs <= 0) break;
          write_outputs(product, packed.element, row + r, at,
                        outputs < kNativeLanes ? outputs : kNativeLanes, sums[r][part]);
        }
      }
    }
  }
}

void multiply_quantized(const PackedRows& rows, const Product& product, int64_t first,
                        int64_t last) {
  const bool has_4_bits = rows.element == Element::kInt4;
#if defined(__AVX512F__)
  if (multiplies_bytes()) {
    return has_4_bits ? multiply_quantized_by<4, ByteProducts>(rows, product, first, last)
                      : multiply_quantized_by<8, ByteProducts>(rows, product, first, last);
  }
#endif
  return has_4_bits ? multiply_quantized_by<4, PairProducts>(rows, product, first, last)
                    : multiply_quantized_by<8, PairProducts>(rows, product, first, last);
}
