#include "match_suffix.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "parallel.h"

namespace fastspec::cpu {
namespace {

constexpr int64_t kTokensPerThread = 1 << 13;

void check_lengths(const MatchSuffixCall& call) {
  for (int64_t b = 0; b < call.batch; ++b) {
    if (call.lengths[b] < 0 || call.lengths[b] > call.width) {
      throw std::invalid_argument("lengths[" + std::to_string(b) + "]: expected 0 to " +
                                  std::to_string(call.width) + ", got " +
                                  std::to_string(call.lengths[b]));
    }
  }
}

// The end of the best occurrence, or `length` if there is none. With r the reversed text,
// matched[i] is the length of the common prefix of r[i:] and r, found in linear time: within a
// range already known to match, [seen_from, seen_to), the answer follows from the beginning of r.
int64_t best_end(const MatchSuffixCall& call, const int32_t* text, int64_t length) {
  const int32_t* last = text + length - 1;
  std::vector<int32_t> matched(length);
  int64_t longest = call.min_match - 1, best = length, seen_from = 0, seen_to = 0;
  for (int64_t i = 1; i < length; ++i) {
    int64_t count = i < seen_to ? std::min<int64_t>(seen_to - i, matched[i - seen_from]) : 0;
    while (i + count < length && last[-count] == last[-(i + count)]) ++count;
    matched[i] = static_cast<int32_t>(count);
    if (i + count > seen_to) {
      seen_from = i;
      seen_to = i + count;
    }
    const int64_t counted = std::min(count, call.max_match);
    if (counted < call.min_match) continue;
    if (counted > longest || (call.earliest && counted == longest)) {
      longest = counted;
      best = length - i;
      if (!call.earliest && longest == call.max_match) break;
    }
  }
  return best;
}

void match_one(const MatchSuffixCall& call, int64_t b) {
  const int32_t* text = call.token_ids + b * call.row_stride;
  int32_t* out = call.out + b * call.num_tokens;
  const int64_t length = call.lengths[b];
  const int64_t end = length > 1 ? best_end(call, text, length) : length;
  const int64_t count = std::min(length - end, call.num_tokens);
  std::copy_n(text + end, count, out);
  std::fill(out + count, out + call.num_tokens, -1);
}

}  // namespace

void match_suffix(const MatchSuffixCall& call) {
  check_lengths(call);
  const int64_t workers =
      std::min(workers_for(call.batch * call.width, kTokensPerThread), call.batch);
  for_each_task(call.batch, workers, [&](int64_t b, int64_t) { match_one(call, b); });
}

}  // namespace fastspec::cpu
