// Shared by the bindings of both extensions.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>

namespace fastspec {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Only rejects invalid arguments; the public ops determine which one is wrong.
inline void require(bool fits) {
  if (!fits) throw std::invalid_argument("the arguments do not fit together");
}

// Rule is the SiblingRule of either backend.
template <typename Rule>
Rule sibling_rule_named(const std::string& name) {
  if (name == "target_only") return Rule::kTargetOnly;
  if (name == "without_replacement") return Rule::kWithoutReplacement;
  require(name == "with_replacement");
  return Rule::kWithReplacement;
}

inline bool has_shape(const Tensor& tensor, std::initializer_list<int64_t> shape) {
  if (tensor.dim() != static_cast<int64_t>(shape.size())) return false;
  int64_t dim = 0;
  for (const int64_t size : shape) {
    if (tensor.size(dim++) != size) return false;
  }
  return true;
}

// Caches of keys and values whose last two dimensions are contiguous, and that are not expanded.
// The strides of a dimension of one do not matter: no kernel multiplies them by anything but 0.
inline void require_caches(const Tensor& key_cache, const Tensor& value_cache, int64_t rank = 4) {
  require(key_cache.dim() == rank && value_cache.dim() == rank);
  const auto has_stride = [&](int64_t dim, int64_t stride) {
    return key_cache.size(dim) <= 1 || key_cache.stride(dim) == stride;
  };
  for (int64_t dim = 0; dim < rank; ++dim) {
    require(dim < rank - 3 || key_cache.size(dim) > 0);
    require(value_cache.size(dim) == key_cache.size(dim));
    require(key_cache.size(dim) <= 1 || key_cache.stride(dim) != 0);
    require(has_stride(dim, value_cache.stride(dim)));
  }
  require(value_cache.scalar_type() == key_cache.scalar_type());
  require(value_cache.device() == key_cache.device());
  require(has_stride(rank - 2, key_cache.size(rank - 1)));
  require(has_stride(rank - 1, 1));
}

// torch's own conversion to std::string never frees the string that it makes (seen in 2.13), which
// would leak about 80 bytes per call of an op.
struct Text : std::string {
  using std::string::string;
};

}  // namespace fastspec

namespace torch::stable::detail {

template <>
struct ToImpl<fastspec::Text> {
  static fastspec::Text call(StableIValue value, [[maybe_unused]] uint64_t version,
                             [[maybe_unused]] bool is_internal) {
    const StringHandle handle = to<StringHandle>(value);
    size_t length;
    const char* data;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    const fastspec::Text text(data, length);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};

}  // namespace torch::stable::detail
