// Rows times weights in register tiles; every weight is read from memory once for all rows.
//
// The sum of each pair of row and output has its own accumulator and takes the terms in the same
// order whatever the tile, so a row's result does not depend on the other rows.
#include "kernels.h"
#include "lanes.h"
#include "linear.h"

namespace fastspec::cpu::FASTSPEC_ISA {
namespace {

// Weights that are read next are on their way while these are multiplied.
constexpr int64_t kPrefetchBytes = 8192;

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

// sums[row][output] of `rows` rows, a padded depth apart, and `outputs` weight rows.
template <int rows, int outputs, class T>
FASTSPEC_INLINE void multiply_tile(const float* input, const T* weight, int64_t depth,
                                   int64_t weight_stride, float* out) {
  const int64_t stride = padded(depth), whole = depth / kNativeLanes * kNativeLanes;
  NativeF32 sums[kNativeLanes] = {};
  const auto add = [&](int64_t k, const auto& load_weight) {
    NativeF32 weights[outputs];
#pragma GCC unroll 16
    for (int n = 0; n < outputs; ++n) weights[n] = load_weight(weight + n * weight_stride + k);
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
      __builtin_prefetch(reinterpret_cast<const char*>(from) + kPrefetchBytes, 0, 2);
      return load_native(from);
    });
  }
  if (whole < depth) add(whole, [&](const T* from) { return load_rest(from, depth - whole); });
  store_native(out, sum_each(sums));
}

// Up to kNativeLanes / rows outputs at a time; the last ones alone, through a tile of one output.
template <int rows, class T>
void multiply_rows(const PackedRows& packed, const Product& product, const T* weight,
                   int64_t weight_stride, int64_t row, int64_t first, int64_t last) {
  constexpr int outputs = kNativeLanes / rows;
  const float* input = static_cast<const float*>(packed.data) + row * padded(packed.depth);
  float sums[kNativeLanes];
  int64_t n = first;
  for (; n + outputs <= last; n += outputs) {
    multiply_tile<rows, outputs>(input, weight + (n - first) * weight_stride, packed.depth,
                                 weight_stride, sums);
    write_tile(product, sums, outputs, 1, row, rows, n, outputs, packed.element);
  }
  for (; n < last; ++n) {
    multiply_tile<rows, 1>(input, weight + (n - first) * weight_stride, packed.depth, weight_stride,
                           sums);
    write_tile(product, sums, 1, 1, row, rows, n, 1, packed.element);
  }
}

// Calls f(std::integral_constant of the number of rows, first row) for each register tile of rows.
template <class F>
FASTSPEC_INLINE void each_tile_of_rows(int64_t num_rows, const F& f) {
  int64_t row = 0;
  for (; row + 4 <= num_rows; row += 4) f(std::integral_constant<int, 4>(), row);
  if (row + 2 <= num_rows) {
    f(std::integral_constant<int, 2>(), row);
    row += 2;
  }
  if (row < num_rows) f(std::integral_constant<int, 1>(), row);
}

// Outputs whose weights stay in the first-level cache, one block after another.
template <class T>
void multiply_wide(const PackedRows& rows, const Product& product, int64_t first, int64_t last) {
  const T* weight = static_cast<const T*>(product.weight);
  for (int64_t n = first; n < last; n += kOutputTile) {
    const int64_t end = n + kOutputTile < last ? n + kOutputTile : last;
    each_tile_of_rows(rows.num_rows, [&](auto count, int64_t row) {
      multiply_rows<count.value>(rows, product, weight + n * rows.depth, rows.depth, row, n, end);
    });
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
        using T = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
        multiply_wide<T>(rows, product, first, last);
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
