// A text that an op takes.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>

namespace fastspec {

// torch's own conversion, to std::string, never frees the string that it makes (seen in 2.13): that
// would cost some 80 bytes for each call of an op.
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
