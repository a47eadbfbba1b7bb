// Element types of tensors, and the padding of float32 scratch rows.
#pragma once
#include <cstdint>

namespace fastspec::cpu {

enum class Element { kFloat32, kBFloat16, kFloat16, kInt8, kInt4 };  // the last two: weights only

constexpr int64_t kRowPadding = 16;  // rows of scratch are padded to whole vectors of any width

inline bool is_quantized(Element element) { return element >= Element::kInt8; }

inline int64_t size_of(Element element) { return element == Element::kFloat32 ? 4 : 2; }

inline int64_t padded(int64_t size) { return (size + kRowPadding - 1) / kRowPadding * kRowPadding; }

}  // namespace fastspec::cpu
