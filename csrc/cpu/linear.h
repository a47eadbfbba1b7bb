// The product of rows with weight matrices, optimised for the few rows of a verification step.
#pragma once
#include <algorithm>
#include <cstdint>

#include "arena.h"
#include "elements.h"
#include "parallel.h"

namespace fastspec::cpu {

// Rows prepared by `pack` for products with weights of one type.
struct PackedRows {
  Element element;  // of the weights
  int64_t num_rows, depth;
  void* data;            // packed_bytes, aligned to 64 bytes
  int64_t together = 1;  // neighbouring rows that share cache lines
};

// out[t][n] = sum over k of rows[t][k] * weight[n][k], plus bias[n].
struct Product {
  const void* weight;  // [num_outputs, depth], contiguous, or quantized blocks
  const void* bias;    // [num_outputs] or null, as the weights, or float32 if these are quantized
  void* out;           // [num_rows, num_outputs], contiguous
  Element out_element;
  int64_t num_outputs;
};

enum class Activation { kSilu, kGeluTanh };

// out[t][n] = activation(sum over k of rows[t][k] * gate[n][k]) * sum over k of rows[t][k] *
// up[n][k]
struct GatedProduct {
  const void* gate;  // [num_outputs, depth], as Product::weight
  const void* up;
  int64_t num_outputs;
  Activation activation;
  float *gates, *ups;  // scratch [num_rows, num_outputs]
};

struct LinearKernels {
  int64_t (*packed_bytes)(Element element, int64_t num_rows, int64_t depth);
  // Rows first..last of [num_rows, depth], contiguous, in float32 or the type of the weights;
  // `first` is a multiple of rows.together. Rows become bfloat16 if the instruction set multiplies
  // that, otherwise float32.
  void (*pack_rows)(const void* input, Element input_element, const PackedRows& rows, int64_t first,
                    int64_t last);
  // Returns PackedRows::together.
  int64_t (*rows_together)(Element element);
  // Outputs first..last of every row; `first` is a multiple of kOutputTile.
  void (*multiply)(const PackedRows& rows, const Product& product, int64_t first, int64_t last);
  // Outputs first..last, packed for a product with weights of the same type; `first` is a multiple
  // of outputs_of_gated_task.
  void (*multiply_gated)(const PackedRows& rows, const GatedProduct& product, const PackedRows& out,
                         int64_t first, int64_t last);
};

constexpr int64_t kOutputTile = 16;

// Quantized weights are blocks [output tiles, blocks of inputs], padded with zeros. Each half of a
// block's inputs has one scale per output. A block begins with these scales, [2, kOutputTile]
// bfloat16, and goes on with quads of neighbouring inputs:
//   8 bits: [16 quads, kOutputTile, 4] bytes that hold value + 128;
//   4 bits: [8 quads, kOutputTile, 4] bytes that hold value + 8, of a quad of the first half in the
//     low bits and of the same quad of the second half in the high bits.
constexpr int64_t kBlockDepth = 64;
constexpr int64_t kScaleBytes = 2 * kOutputTile * 2;

constexpr int64_t block_bytes(Element element) {
  return kScaleBytes + kOutputTile * kBlockDepth / (element == Element::kInt4 ? 2 : 1);
}

// Returns size / part, rounded up, without overflow: a malformed call may name any size up to
// INT64_MAX.
inline int64_t divided_up(int64_t size, int64_t part) { return size / part + (size % part != 0); }

inline int64_t depth_blocks(int64_t depth) { return divided_up(depth, kBlockDepth); }

constexpr int64_t kProductsPerWorker = 1 << 17;  // multiply-adds: tens of us, with weights read

inline int64_t output_tiles(int64_t num_outputs) { return divided_up(num_outputs, kOutputTile); }

// Outputs of a task of multiply_gated: those that are packed together.
inline int64_t outputs_of_gated_task(const PackedRows& rows) {
  return is_quantized(rows.element) ? kBlockDepth : kOutputTile;
}

// Outputs of a task: two tiles for many rows that share cache lines, as they then share loads.
inline int64_t outputs_of_task(const PackedRows& rows) {
  const bool many = rows.together > 1 && rows.num_rows > 2 * rows.together;
  return many ? 2 * kOutputTile : kOutputTile;
}

PackedRows take_rows(Element element, int64_t num_rows, int64_t depth, Arena& arena);

// Phase: calls body(first, last), which packs some rows, for all rows. One worker handles rows that
// share cache lines, because several would take the lines from each other at every store.
template <class Body>
void share_rows(const PackedRows& rows, Team::Member& member, const Body& body) {
  member.share(divided_up(rows.num_rows, rows.together), [&](int64_t group) {
    const int64_t first = group * rows.together;
    body(first, std::min(first + rows.together, rows.num_rows));
  });
}

// Phase: packs all rows of [num_rows, depth], contiguous.
void pack(const void* input, Element input_element, const PackedRows& rows, Team::Member& member);

// Phase: products of the same rows.
void multiply(const PackedRows& rows, const Product* products, int64_t count, Team::Member& member);

// One product of [num_rows, depth]; everything is contiguous. Input and output have one type, and
// so have weights and bias unless they are quantized.
struct LinearCall {
  const void* input;
  const void* weight;
  const void* bias;  // or null
  void* out;
  int64_t num_rows, num_outputs, depth;
  Element element, weight_element;
};

void linear(const LinearCall& call);

}  // namespace fastspec::cpu
