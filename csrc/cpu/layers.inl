// Normalisation and rotation, one row at a time, with sums in a fixed order.
#include <cmath>

#include "lanes.h"
#include "layers.h"

namespace fastspec::cpu::FASTSPEC_ISA {
namespace {

template <class T>
void rms_norm_typed(const float* x, const T* weight, int64_t size, float eps, float shift,
                    float* out) {
  NativeF32 squares = {};
  int64_t k = 0;
  for (; k + kNativeLanes <= size; k += kNativeLanes) {
    const NativeF32 v = load_native(x + k);
    squares = multiply_add(v, v, squares);
  }
  float sum = total(squares);
  for (; k < size; ++k) sum += x[k] * x[k];
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
  for (k = 0; k + kNativeLanes <= size; k += kNativeLanes) {
    store_native(out + k, load_native(x + k) * scale * (load_native(weight + k) + shift));
  }
  for (; k < size; ++k) out[k] = x[k] * scale * (load_one(weight + k) + shift);
}

void rms_norm(const float* x, const Norm& norm, int64_t size, float* out) {
  with_type(norm.element, [&](auto type) {
    const auto* weight = static_cast<decltype(type)>(norm.weight);
    rms_norm_typed(x, weight, size, norm.eps, norm.shift, out);
  });
}

void rotate(float* x, const float* cos, const float* sin, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float first = x[i], second = x[i + half];
    x[i] = first * cos[i] - second * sin[i];
    x[i + half] = second * cos[i + half] + first * sin[i + half];
  }
}

void add(const float* from, int64_t size, float* to) {
  for (int64_t i = 0; i < size; ++i) to[i] += from[i];
}

void widen_values(const void* from, Element element, int64_t size, float* to) {
  with_type(element, [&](auto type) { convert_row(static_cast<decltype(type)>(from), size, to); });
}

void narrow_values(const float* from, int64_t size, Element element, void* to) {
  with_type(element, [&](auto type) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
    convert_row(from, size, static_cast<T*>(to));
  });
}

constexpr LayerKernels kLayers = {rms_norm, rotate, add, widen_values, narrow_values};

}  // namespace
}  // namespace fastspec::cpu::FASTSPEC_ISA
