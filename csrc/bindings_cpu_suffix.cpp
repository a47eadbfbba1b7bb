// Unpacks the tensors of the suffix match, allocates its output, and registers it.
#include <string>

#include "bindings_cpu.h"
#include "cpu/match_suffix.h"

namespace fastspec {
namespace {

Tensor match_suffix(const Tensor& token_ids, const Tensor& lengths, int64_t min_match,
                    int64_t max_match, int64_t num_tokens, const Text& rule) {
  require(token_ids.dim() == 2 && token_ids.scalar_type() == ScalarType::Int);
  const int64_t batch = token_ids.size(0), width = token_ids.size(1);
  require(width < 2 || token_ids.stride(1) == 1);
  require(lengths.dim() == 1 && lengths.size(0) == batch);
  require(lengths.scalar_type() == ScalarType::Int && lengths.is_contiguous());
  require(min_match >= 1 && max_match >= min_match && num_tokens >= 0);
  require(rule == "latest" || rule == "earliest_longest");
  Tensor out = new_tensor({batch, num_tokens}, ScalarType::Int);
  cpu::match_suffix({token_ids.const_data_ptr<int32_t>(), token_ids.stride(0), batch, width,
                     lengths.const_data_ptr<int32_t>(), min_match, max_match, num_tokens,
                     rule == "earliest_longest", out.mutable_data_ptr<int32_t>()});
  return out;
}

}  // namespace
}  // namespace fastspec

STABLE_TORCH_LIBRARY_IMPL(fastspec, CPU, m) {
  m.impl("match_suffix", TORCH_BOX(&fastspec::match_suffix));
}
