// Rows times weights in register tiles; every weight is read from memory once for all rows, or once
// for each large part of very many.
//
// The sum of each pair of row and output has its own accumulator and adds terms in the same order
// for any tile, so a row's result does not depend on the other rows.
#include "activations.h"
#include "amx.h"
#include "kernels.h"
#include "lanes.h"
#include "linear.h"

namespace fastspec::cpu::FASTSPEC_ISA {
namespace {

// Prefetches of a register tile while it multiplies: weights this many bytes ahead, for those of
// its outputs that are in the mask.
struct Ahead {
  int64_t bytes;
  uint32_t mask;

  // One output is read front to back, which the processor prefetches by itself: well enough for one
  // or two rows. Its mask is full.
  template <int rows, int outputs, class T>
  FASTSPEC_INLINE void fetch(const T* from, int output) const {
    if constexpr (rows <= 2 && outputs == 1) return;
    if (outputs > 1 && (mask >> output & 1) == 0) return;
    __builtin_prefetch(reinterpret_cast<const char*>(from) + bytes, 0, 2);
  }
};

// For groups of rows that find their weights in a cache: even a mask of 0 takes a tenth of the
// time.
struct NoPrefetch {
  template <int rows, int outputs, class T>
  FASTSPEC_INLINE void fetch(const T*, int) const {}
};

// out[i] = sums[i] + bias[i] for the `count` outputs of a row from n on.
FASTSPEC_INLINE void write_outputs(const Product& product, Element weights, int64_t row, int64_t n,
                                   int64_t count, NativeF32 sums) {
  if (product.bias != nullptr) {
    with_type(weights, [&](auto type) FASTSPEC_INLINE_LAMBDA {
      sums += load_rest(static_cast<decltype(type)>(product.bias) + n, count);
    });
  }
  with_type(product.out_element, [&](auto type) FASTSPEC_INLINE_LAMBDA {
    using Out = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
    Out* out = static_cast<Out*>(product.out) + row * product.num_outputs + n;
    if (count == kNativeLanes) return store_native(out, sums);
    for (int64_t i = 0; i < count; ++i) convert(sums[i], out + i);
  });
}

// Multiplies float32 rows, `stride` values apart, by weights: the sums of row r and some outputs
// become sums[r * kNativeLanes], see sum_some.
struct WideTiles {
  // Outputs processed at once, unless NearRows apply. A single row reads weights in memory order,
  // but short vectors need several sums in parallel to keep up. More rows share loads: two or three
  // are fastest with two outputs, more with as many as the registers hold.
  template <int rows>
  static constexpr int kOutputs = rows == 1                        ? kParts
                                  : rows <= 3 || kNativeLanes < 16 ? 2
                                                                   : 4;

  template <int rows, int outputs, class T, class Prefetch>
  FASTSPEC_INLINE static void multiply(const float* input, int64_t stride, const T* weight,
                                       int64_t depth, Prefetch ahead, NativeF32* sums) {
    const int64_t whole = depth / kNativeLanes * kNativeLanes;
    NativeF32 own[rows][outputs] = {};
    const auto add = [&](int64_t k, const auto& load_weight) FASTSPEC_INLINE_LAMBDA {
      NativeF32 weights[outputs];
#pragma GCC unroll 4
      for (int n = 0; n < outputs; ++n) {
        weights[n] = load_weight(weight + n * depth + k);
        ahead.template fetch<rows, outputs>(weight + n * depth + k, n);
      }
#pragma GCC unroll 12
      for (int r = 0; r < rows; ++r) {
        const NativeF32 x = load_native(input + r * stride + k);
#pragma GCC unroll 4
        for (int n = 0; n < outputs; ++n) own[r][n] = multiply_add(x, weights[n], own[r][n]);
      }
    };
    for (int64_t k = 0; k < whole; k += kNativeLanes) {
      add(k, [](const T* from) { return load_native(from); });
    }
    if (whole < depth) add(whole, [&](const T* from) { return load_rest(from, depth - whole); });
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) sums[r * kNativeLanes] = sum_some<outputs>(own[r]);
  }
};

// Rows times outputs first..last, `outputs` at once.
template <int rows, int outputs, class Tiles, class X, class W, class Prefetch>
void multiply_rows(const PackedRows& packed, const Product& product, const X* input, int64_t stride,
                   const W* weight, Prefetch ahead, int64_t row, int64_t first, int64_t last) {
  const int64_t depth = packed.depth;
  for (int64_t n = first; n < last; n += kNativeLanes) {
    const int64_t count = last - n < kNativeLanes ? last - n : kNativeLanes;
    NativeF32 sums[rows][kNativeLanes];  // each tile fills one vector of them
    if (count < kNativeLanes) std::memset(sums, 0, sizeof(sums));
    int64_t i = 0;
    for (; i + outputs <= count; i += outputs, weight += outputs * depth) {
      Tiles::template multiply<rows, outputs>(input, stride, weight, depth, ahead,
                                              sums[0] + i / outputs);
    }
    for (int r = 0; r < rows && i < count; ++r) {
      NativeF32 rest[outputs] = {};
      for (int64_t left = 0; i + left < count; ++left) {
        Tiles::template multiply<1, 1>(input + r * stride, stride, weight + left * depth, depth,
                                       ahead, rest + left);
      }
      sums[r][i / outputs] = sum_some<outputs>(rest);
    }
    for (int r = 0; r < rows; ++r) {
      const NativeF32 totals = sum_parts<outputs>(sums[r]);
      write_outputs(product, packed.element, row + r, n, count, totals);
    }
  }
}

// Prefetches of a tile of `outputs`: whole tiles ahead, or some lines would be fetched after they
// were read. If several groups of rows use the same outputs, the first ones share the prefetching,
// so that memory is busy in all of them.
template <int outputs>
FASTSPEC_INLINE Ahead ahead_of(int64_t group, int64_t num_groups, int64_t output_bytes) {
  constexpr int64_t kLeastBytes = 16384;
  if (num_groups == 1) {
    const int64_t tile_bytes = outputs * output_bytes;
    return {tile_bytes == 0 ? 0 : (kLeastBytes / tile_bytes + 1) * tile_bytes, ~0u};
  }
  Ahead ahead = {kOutputTile * output_bytes, 0};
  for (int64_t i = group; i < outputs; i += num_groups) ahead.mask |= 1u << i;
  return ahead;
}

// A few rows that stay in the nearest cache are loaded for every output or two, so that weights are
// read in the order of memory or nearly so. Rows of another type than the weights are twice as
// large, and loading them so often takes longer than it saves.
template <class X, class W>
struct NearRows {
  // Vectors of 16 lanes come with registers for the sums of twelve rows and two outputs; with
  // shorter ones, few sums at once do not keep up with memory.
  static constexpr int kMostRows = sizeof(X) != sizeof(W) || kNativeLanes < 8 ? 1
                                   : kNativeLanes == 8                        ? 3
                                                                              : 12;
  template <int rows>
  static constexpr int kOutputs = rows <= 5 ? 1 : 2;

  static bool fit(int64_t num_rows, int64_t stride) {
    constexpr int64_t kMostBytes = 24576;
    return 1 < num_rows && num_rows <= kMostRows &&
           num_rows * stride * int64_t{sizeof(X)} <= kMostBytes;
  }

  // Whole outputs, two at least if two are processed at once: six rows that fit have outputs of at
  // most 4096 bytes. Closer ones the processor has prefetched by itself.
  static Ahead ahead(int64_t output_bytes) {
    constexpr int64_t kLeastBytes = 6144;
    return {output_bytes == 0 ? 0 : divided_up(kLeastBytes, output_bytes) * output_bytes, ~0u};
  }
};

// Calls run with an integral_constant: the number of rows, up to `most`.
template <int most, class Run>
FASTSPEC_INLINE void with_rows(int64_t num_rows, const Run& run) {
  if constexpr (most > 1) {
    if (num_rows < most) return with_rows<most - 1>(num_rows, run);
  }
  run(std::integral_constant<int, most>());
}

// A few outputs at a time are multiplied by all rows that the second-level cache keeps meanwhile,
// up to six at once unless they are near, so that both stay in the nearest caches. Rows are
// `stride` values apart.
template <class Tiles, class X, class W>
void multiply_tiles_of(const PackedRows& rows, const Product& product, const X* input,
                       const W* weight, int64_t stride, int64_t first, int64_t last) {
  using Near = NearRows<X, W>;
  constexpr int kMostOfGroup = 6;
  constexpr int64_t kMostBytes = 1 << 19, kLeastRows = 64;  // of a part, if there are several
  const int64_t output_bytes = rows.depth * sizeof(W), row_bytes = stride * sizeof(X);
  if (Near::fit(rows.num_rows, stride)) {
    return with_rows<Near::kMostRows>(rows.num_rows, [&](auto count) {
      multiply_rows<count.value, Near::template kOutputs<count.value>, Tiles>(
          rows, product, input, stride, weight + first * rows.depth, Near::ahead(output_bytes), 0,
          first, last);
    });
  }
  const int64_t most_parts = rows.num_rows < kLeastRows ? 1 : rows.num_rows / kLeastRows;
  const int64_t parts = rows.num_rows * row_bytes / kMostBytes + 1;
  const int64_t num_parts = parts < most_parts ? parts : most_parts;
  for (int64_t part = 0; part < num_parts; ++part) {
    const int64_t start = rows.num_rows * part / num_parts;
    const int64_t num_rows = rows.num_rows * (part + 1) / num_parts - start;
    const int64_t num_groups = divided_up(num_rows, kMostOfGroup);
    const int64_t size = num_rows / num_groups, num_larger = num_rows % num_groups;
    for (int64_t n = first; n < last; n += kOutputTile) {
      const int64_t end = n + kOutputTile < last ? n + kOutputTile : last;
      for (int64_t row = start, group = 0; group < num_groups; ++group) {
        with_rows<kMostOfGroup>(size + (group < num_larger), [&](auto count) {
          constexpr int outputs = Tiles::template kOutputs<count.value>;
          const auto multiply = [&](auto ahead) {
            multiply_rows<count.value, outputs, Tiles>(rows, product, input + row * stride, stride,
                                                       weight + n * rows.depth, ahead, row, n, end);
          };
          if (group < outputs) {
            multiply(ahead_of<outputs>(group, num_groups, output_bytes));
          } else {
            multiply(NoPrefetch());
          }
          row += count.value;
        });
      }
    }
  }
}

#include "linear_dot.inl"
#include "linear_quantized.inl"

// The layout of rows for products with weights of a type.
enum class Packing {
  kWide,   // float32 [rows, padded(depth)]
  kPairs,  // bfloat16 [rows, depth padded to kPairDepth]
  kTiles,  // bfloat16 [blocks of 16 rows, tiles of kPairDepth, pair, row, 2]
  kBytes,  // RowBlock [rows, depth_blocks(depth)]
};

Packing packing_of(Element element) {
  if (is_quantized(element)) return Packing::kBytes;
  if (element != Element::kBFloat16 || !multiplies_bfloat16()) return Packing::kWide;
  return multiplies_tiles() ? Packing::kTiles : Packing::kPairs;
}

int64_t packed_bytes(Element element, int64_t num_rows, int64_t depth) {
  switch (packing_of(element)) {
    case Packing::kWide:
      return num_rows * padded(depth) * sizeof(float);
    case Packing::kPairs:
      return num_rows * pair_tiles(depth) * kPairDepth * sizeof(BF16);
    case Packing::kBytes:
      return num_rows * depth_blocks(depth) * sizeof(RowBlock);
    default:
      return row_blocks(num_rows) * pair_tiles(depth) * sizeof(PairTile);
  }
}

int64_t rows_together(Element element) {
  return packing_of(element) == Packing::kTiles ? kTileRowsOfAmx : 1;
}

// Values first..last of a row, which begins at `from`, and zeros after the end of the row. Both are
// multiples of what is packed together, or the end.
template <class T>
void pack_row(const T* from, const PackedRows& rows, int64_t row, int64_t first, int64_t last) {
  const Packing packing = packing_of(rows.element);
  if (packing == Packing::kWide) {
    float* to = static_cast<float*>(rows.data) + row * padded(rows.depth);
    widen_row(from + first, last - first, to + first);
  } else if (packing == Packing::kPairs) {
    const int64_t size = pair_tiles(rows.depth) * kPairDepth;
    BF16* to = static_cast<BF16*>(rows.data) + row * size;
    narrow_row(from + first, last - first, (last < rows.depth ? last : size) - first, to + first);
  } else {
    quantize_row(from, rows, row, first, last);
  }
}

void pack_rows(const void* input, Element input_element, const PackedRows& rows, int64_t first,
               int64_t last) {
  with_type(input_element, [&](auto type) {
    const auto* from = static_cast<decltype(type)>(input);
    if (packing_of(rows.element) == Packing::kTiles) return pack_blocks(from, rows, first, last);
    for (int64_t row = first; row < last; ++row) {
      pack_row(from + row * rows.depth, rows, row, 0, rows.depth);
    }
  });
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
    case Packing::kBytes:
      return multiply_quantized(rows, product, first, last);
    default:
      return multiply_tiles(rows, product, first, last);
  }
}

// gates[i] = f(gates[i]) * ups[i]
template <class F>
FASTSPEC_INLINE void gate(float* gates, const float* ups, int64_t size, const F& f) {
  int64_t i = 0;
  for (; i + kNativeLanes <= size; i += kNativeLanes) {
    store_native(gates + i, f(load_native(gates + i)) * load_native(ups + i));
  }
  for (; i < size; ++i) gates[i] = f(native(gates[i]))[0] * ups[i];
}

// With few rows it reads long runs of either weights; with many rows the activation follows while
// its inputs are still cached.
void multiply_gated(const PackedRows& rows, const GatedProduct& product, const PackedRows& out,
                    int64_t first, int64_t last) {
  if (packing_of(rows.element) == Packing::kTiles) {
    return multiply_gated_tiles(rows, product, out, first, last);
  }
  constexpr int64_t kFewRows = 16;
  const int64_t size = product.num_outputs;
  const int64_t most = rows.num_rows <= kFewRows ? last - first : kBlockDepth;
  const Product gates = {product.gate, nullptr, product.gates, Element::kFloat32, size};
  const Product ups = {product.up, nullptr, product.ups, Element::kFloat32, size};
  for (int64_t n = first; n < last; n += most) {
    const int64_t end = last - n < most ? last : n + most;
    multiply(rows, gates, n, end);
    multiply(rows, ups, n, end);
    with_activation(product.activation, [&](auto f) FASTSPEC_INLINE_LAMBDA {
      for (int64_t row = 0; row < rows.num_rows; ++row) {
        float* values = product.gates + row * size;
        gate(values + n, product.ups + row * size + n, end - n, f);
        pack_row(values, out, row, n, end);
      }
    });
  }
}

constexpr LinearKernels kLinear = {packed_bytes, pack_rows, rows_together, multiply,
                                   multiply_gated};

}  // namespace
}  // namespace fastspec::cpu::FASTSPEC_ISA
