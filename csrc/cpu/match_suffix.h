// Finds an earlier occurrence of the end of a text.
#pragma once
#include <cstdint>

namespace fastspec::cpu {

struct MatchSuffixCall {
  const int32_t* token_ids;  // [batch, width], rows row_stride apart
  int64_t row_stride, batch, width;
  const int32_t* lengths;  // [batch]
  int64_t min_match, max_match, num_tokens;
  bool earliest;
  int32_t* out;  // [batch, num_tokens]
};

// Throws std::invalid_argument before anything is written if a length is not in 0..width.
void match_suffix(const MatchSuffixCall& call);

}  // namespace fastspec::cpu
