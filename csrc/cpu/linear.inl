// Rows times weights in register tiles; every weight is read from memory once for all rows.
#include "lanes.h"
#include "linear.h"

namespace fastspec::cpu::FASTSPEC_ISA {
namespace {

// Weights that are read next are on their way while these are multiplied.
constexpr int64_t kPrefetchBytes = 8192;

// The last, incomplete vector of a weight row.
template <class T>
FASTSPEC_INLINE NativeF32 load_rest(const T* from, int64_t count) {
  T rest[kNativeLanes] = {};
  std::memcpy(rest, from, count * sizeof(T));
  return load_native(rest);
}

template <class T>
void widen_rows_typed(const LinearCall& call, float* rows) {
  const int64_t stride = padded(call.depth);
  const T* input = static_cast<const T*>(call.input);
  for (int64_t t = 0; t < call.num_rows; ++t) {
    widen_row(input + t * call.depth, call.depth, rows + t * stride);
  }
}

// `rows` rows times `outputs` weight rows. The sum of each pair has its own accumulator and takes
// the terms in the same order whatever the tile, so a row's result does not depend on the other
// rows.
template <int rows, int outputs, class T>
FASTSPEC_INLINE NativeF32 multiply_tile(const float* input, const T* weight, int64_t depth) {
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
      __builtin_prefetch(reinterpret_cast<const char*>(from) + kPrefetchBytes, 0, 2);
      return load_native(from);
    });
  }
  if (whole < depth) add(whole, [&](const T* from) { return load_rest(from, depth - whole); });
  return sum_each(sums);
}

// Up to kNativeLanes / rows outputs at a time; the last ones alone, through a tile of one output.
template <int rows, class T>
void multiply_rows(const LinearCall& call, const float* input, int64_t row, int64_t first,
                   int64_t last) {
  constexpr int outputs = kNativeLanes / rows;
  const T* weight = static_cast<const T*>(call.weight);
  const T* bias = static_cast<const T*>(call.bias);
  const auto write = [&](const NativeF32& sums, int64_t n, int count, int per_row) {
    for (int r = 0; r < rows; ++r) {
      T* out = static_cast<T*>(call.out) + (row + r) * call.num_outputs + n;
      for (int i = 0; i < count; ++i) {
        const float shift = bias == nullptr ? 0.0f : load_rest(bias + n + i, 1)[0];
        convert(sums[r * per_row + i] + shift, out + i);
      }
    }
  };
  int64_t n = first;
  for (; n + outputs <= last; n += outputs) {
    write(multiply_tile<rows, outputs>(input, weight + n * call.depth, call.depth), n, outputs,
          outputs);
  }
  for (; n < last; ++n) {
    write(multiply_tile<rows, 1>(input, weight + n * call.depth, call.depth), n, 1, 1);
  }
}

template <class T>
void multiply_typed(const LinearCall& call, const float* rows, int64_t first, int64_t last) {
  constexpr int64_t kBlock = 16;  // outputs whose weights stay in the first-level cache
  const int64_t stride = padded(call.depth);
  for (int64_t n = first; n < last; n += kBlock) {
    const int64_t end = n + kBlock < last ? n + kBlock : last;
    int64_t row = 0;
    for (; row + 4 <= call.num_rows; row += 4) {
      multiply_rows<4, T>(call, rows + row * stride, row, n, end);
    }
    if (row + 2 <= call.num_rows) {
      multiply_rows<2, T>(call, rows + row * stride, row, n, end);
      row += 2;
    }
    if (row < call.num_rows) multiply_rows<1, T>(call, rows + row * stride, row, n, end);
  }
}

void widen_rows(const LinearCall& call, float* rows) {
  switch (call.element) {
    case Element::kFloat32:
      return widen_rows_typed<float>(call, rows);
    case Element::kBFloat16:
      return widen_rows_typed<BF16>(call, rows);
    case Element::kFloat16:
      return widen_rows_typed<F16>(call, rows);
  }
}

void multiply(const LinearCall& call, const float* rows, int64_t first, int64_t last) {
  switch (call.element) {
    case Element::kFloat32:
      return multiply_typed<float>(call, rows, first, last);
    case Element::kBFloat16:
      return multiply_typed<BF16>(call, rows, first, last);
    case Element::kFloat16:
      return multiply_typed<F16>(call, rows, first, last);
  }
}

constexpr LinearKernels kLinear = {widen_rows, multiply};

}  // namespace
}  // namespace fastspec::cpu::FASTSPEC_ISA
