// Rows times weights in register tiles; every weight is read from memory once for all rows.
//
// The sum of each pair of row and output has its own accumulator and takes the terms in the same
// order whatever the tile, so a row's result does not depend on the other rows.
#include "amx.h"
#include "kernels.h"
#include "lanes.h"
#include "linear.h"

namespace fastspec::cpu::FASTSPEC_ISA {
namespace {

// Weights that are read next are on their way while these are multiplied.
constexpr int64_t kPrefetchBytes = 8192;

template <class T>
FASTSPEC_INLINE void prefetch_weights(const T* from) {
  __builtin_prefetch(reinterpret_cast<const char*>(from) + kPrefetchBytes, 0, 2);
}

// Writes sums[row][output] of a tile, plus the bias, to the output's columns from n on.
FASTSPEC_INLINE void write_tile(const Product& product, const float* sums, int64_t row_step,
                                int64_t output_step, int64_t row, int64_t rows, int64_t n,
                                int64_t outputs, Element weights) {
  float bias[kOutputTile] = {};
  if (product.bias != nullptr) {
    with_type(weights, [&](auto type) {
      const auto* from = static_cast<decltype(type)>(product.bias) + n;
      for (int64_t i = 0; i < outputs; ++i) bias[i] = load_one(from + i);
    });
  }
  with_type(product.out_element, [&](auto type) {
    using Out = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
    for (int64_t r = 0; r < rows; ++r) {
      Out* out = static_cast<Out*>(product.out) + (row + r) * product.num_outputs + n;
      for (int64_t i = 0; i < outputs; ++i) {
        convert(sums[r * row_step + i * output_step] + bias[i], out + i);
      }
    }
  });
}

// How float32 rows, a padded depth apart, meet weights: sums[row][output] of a register tile.
struct WideTiles {
  template <int rows, int outputs, bool fetch, class T>
  FASTSPEC_INLINE static void multiply(const float* input, const T* weight, int64_t depth,
                                       float* out) {
    const int64_t stride = padded(depth), whole = depth / kNativeLanes * kNativeLanes;
    NativeF32 sums[kNativeLanes] = {};
    const auto add = [&](int64_t k, const auto& load_weight) {
      NativeF32 weights[outputs];
#pragma GCC unroll 16
      for (int n = 0; n < outputs; ++n) weights[n] = load_weight(weight + n * depth + k);
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        const NativeF32 x = load_native(input + r * stride + k);
#pragma GCC unroll 16
        for (int n = 0; n < outputs; ++n) {
          sums[r * outputs + n] = multiply_add(x, weights[n], sums[r * outputs + n]);
        }
      }
    };
    for (int64_t k = 0; k < whole; k += kNativeLanes) {
      add(k, [](const T* from) {
        if constexpr (fetch) prefetch_weights(from);
        return load_native(from);
      });
    }
    if (whole < depth) add(whole, [&](const T* from) { return load_rest(from, depth - whole); });
    store_native(out, sum_each(sums));
  }
};

// Rows times outputs first..last, as many at a time as fill the registers with `rows` rows; the
// last ones alone. The first rows fetch the weights.
template <int rows, class Tiles, class X, class W>
void multiply_rows(const PackedRows& packed, const Product& product, const X* input,
                   const W* weight, int64_t row, int64_t first, int64_t last) {
  constexpr int outputs = kNativeLanes / rows;
  float sums[kNativeLanes];
  const auto run = [&](int64_t n, auto count, auto fetch) {
    Tiles::template multiply<rows, count.value, fetch.value>(
        input, weight + (n - first) * packed.depth, packed.depth, sums);
    write_tile(product, sums, count.value, 1, row, rows, n, count.value, packed.element);
  };
  const auto run_all = [&](auto fetch) {
    int64_t n = first;
    for (; n + outputs <= last; n += outputs) {
      run(n, std::integral_constant<int, outputs>(), fetch);
    }
    for (; n < last; ++n) run(n, std::integral_constant<int, 1>(), fetch);
  };
  if (row == 0) {
    run_all(std::true_type());
  } else {
    run_all(std::false_type());
  }
}

// A few outputs at a time meet all rows but the last ones, so that the first-level cache holds
// both. `stride` values lie from one row to the next.
template <class Tiles, class X, class W>
void multiply_tiles_of(const PackedRows& rows, const Product& product, const X* input,
                       const W* weight, int64_t stride, int64_t first, int64_t last) {
  constexpr int64_t kFew = kNativeLanes / 4;
  const int64_t whole = rows.num_rows / 4 * 4, depth = rows.depth;
  for (int64_t block = first; block < last; block += kOutputTile) {
    const int64_t end = block + kOutputTile < last ? block + kOutputTile : last;
    for (int64_t n = block; n < end && whole > 0; n += kFew) {
      const int64_t few = n + kFew < end ? n + kFew : end;
      for (int64_t row = 0; row < whole; row += 4) {
        multiply_rows<4, Tiles>(rows, product, input + row * stride, weight + n * depth, row, n,
                                few);
      }
    }
    int64_t row = whole;
    if (row + 2 <= rows.num_rows) {
      multiply_rows<2, Tiles>(rows, product, input + row * stride, weight + block * depth, row,
                              block, end);
      row += 2;
    }
    if (row < rows.num_rows) {
      multiply_rows<1, Tiles>(rows, product, input + row * stride, weight + block * depth, row,
                              block, end);
    }
  }
}

#include "linear_dot.inl"

// How rows are laid out for products with weights of a type.
enum class Packing {
  kWide,   // float32 [rows, padded(depth)]
  kPairs,  // bfloat16 [rows, depth padded to kPairDepth]
  kTiles,  // bfloat16 [blocks of 16 rows, tiles of kPairDepth, pair, row, 2]
};

Packing packing_of(Element element) {
  if (element != Element::kBFloat16 || !multiplies_bfloat16()) return Packing::kWide;
  return multiplies_tiles() ? Packing::kTiles : Packing::kPairs;
}

int64_t packed_bytes(Element element, int64_t num_rows, int64_t depth) {
  switch (packing_of(element)) {
    case Packing::kWide:
      return num_rows * padded(depth) * sizeof(float);
    case Packing::kPairs:
      return num_rows * pair_tiles(depth) * kPairDepth * sizeof(BF16);
    default:
      return row_blocks(num_rows) * pair_tiles(depth) * sizeof(PairTile);
  }
}

template <class T>
void pack_typed(const T* input, const PackedRows& rows) {
  const Packing packing = packing_of(rows.element);
  for (int64_t t = 0; t < rows.num_rows; ++t, input += rows.depth) {
    if (packing == Packing::kWide) {
      widen_row(input, rows.depth, static_cast<float*>(rows.data) + t * padded(rows.depth));
    } else if (packing == Packing::kPairs) {
      narrow_row(input, rows.depth, pair_tiles(rows.depth) * kPairDepth,
                 static_cast<BF16*>(rows.data) + t * pair_tiles(rows.depth) * kPairDepth);
    } else {
      pack_pairs(input, rows, t);
    }
  }
}

void pack(const void* input, Element input_element, const PackedRows& rows) {
  if (packing_of(rows.element) == Packing::kTiles) clear_tiles(rows);
  with_type(input_element,
            [&](auto type) { pack_typed(static_cast<decltype(type)>(input), rows); });
}

void multiply(const PackedRows& rows, const Product& product, int64_t first, int64_t last) {
  switch (packing_of(rows.element)) {
    case Packing::kWide:
      return with_type(rows.element, [&](auto type) {
        multiply_tiles_of<WideTiles>(rows, product, static_cast<const float*>(rows.data),
                                     static_cast<decltype(type)>(product.weight),
                                     padded(rows.depth), first, last);
      });
    case Packing::kPairs:
      return multiply_pairs(rows, product, first, last);
    default:
      return multiply_tiles(rows, product, first, last);
  }
}

constexpr LinearKernels kLinear = {packed_bytes, pack, multiply};

}  // namespace
}  // namespace fastspec::cpu::FASTSPEC_ISA
