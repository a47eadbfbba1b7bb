#include "penalize.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "common/half.h"
#include "parallel.h"

namespace fastspec::cpu {
namespace {

constexpr int64_t kEntriesPerThread = 1 << 13;
constexpr int32_t kNone = std::numeric_limits<int32_t>::max();

// The edit of one token in one row.
struct Edit {
  bool seen = false;
  int64_t count = 0;
  float bias = -0.0f;  // which leaves the sign of a zero alone
};

struct Penalties {
  float repetition, presence, frequency;

  float apply(const Edit& edit, float x) const {
    x += edit.bias;
    if (edit.seen) x = x > 0 ? x / repetition : x * repetition;
    if (edit.count > 0) {
      // In double, where it is exact, so no compiler can fuse it with the addition.
      const auto each = static_cast<float>(double{frequency} * static_cast<double>(edit.count));
      x -= each + presence;
    }
    return x;
  }
};

float at_or(const float* values, int32_t index, float otherwise) {
  return values == nullptr ? otherwise : values[index];
}

void edit_logit(const PenalizeCall& call, int64_t at, const Penalties& penalties,
                const Edit& edit) {
  if (call.element == Element::kFloat32) {
    float* logit = static_cast<float*>(call.logits) + at;
    *logit = penalties.apply(edit, *logit);
    return;
  }
  uint16_t* logit = static_cast<uint16_t*>(call.logits) + at;
  *logit = call.element == Element::kBFloat16
               ? bfloat16_from_float(penalties.apply(edit, bfloat16_to_float(*logit)))
               : float16_from_float(penalties.apply(edit, float16_to_float(*logit)));
}

std::vector<int32_t> path_of(const PenalizeCall& call, int64_t row) {
  const int64_t first = call.row_sequence[row] * call.num_nodes;
  std::vector<int32_t> tokens;
  int32_t node = call.row_node[row];
  while (node > 0) {
    tokens.push_back(call.tree_token_ids[first + node]);
    node = call.parents == nullptr ? node - 1 : call.parents[first + node];
  }
  return tokens;
}

// History, bias and path in the order of their ids, merged: each token is edited once.
void penalize_row(const PenalizeCall& call, int64_t row) {
  std::vector<int32_t> path = path_of(call, row);
  const auto depth = static_cast<int32_t>(path.size());
  std::sort(path.begin(), path.end());
  const int32_t b = call.row_sequence[row];
  const Penalties penalties = {at_or(call.repetition_penalty, b, 1.0f),
                               at_or(call.presence_penalty, b, 0.0f),
                               at_or(call.frequency_penalty, b, 0.0f)};
  int32_t history = call.cu_history[b], entry = call.cu_bias[b];
  auto next = path.begin();
  const auto known = [&] {
    return history < call.cu_history[b + 1] ? call.history_ids[history] : kNone;
  };
  const auto biased = [&] { return entry < call.cu_bias[b + 1] ? call.bias_ids[entry] : kNone; };
  const auto on_path = [&] { return next != path.end() ? *next : kNone; };
  for (;;) {
    const int32_t token = std::min({known(), biased(), on_path()});
    if (token >= call.vocab || token == kNone) return;
    Edit edit;
    bool changes = false;
    if (known() == token) {
      edit.seen = true;
      edit.count = call.history_counts[history++];
    }
    for (; on_path() == token; ++next) {
      edit.seen = true;
      ++edit.count;
    }
    if (biased() == token) {
      changes = depth < call.bias_until[entry];
      if (changes) edit.bias = call.bias[entry];
      ++entry;
    }
    if (token >= 0 && (edit.seen || changes)) {
      edit_logit(call, row * call.row_stride + token, penalties, edit);
    }
  }
}

}  // namespace

void penalize(const PenalizeCall& call) {
  int64_t entries = 0;
  for (int64_t row = 0; row < call.rows; ++row) {
    const int32_t b = call.row_sequence[row];
    entries += call.cu_history[b + 1] - call.cu_history[b] + call.cu_bias[b + 1] - call.cu_bias[b] +
               call.row_node[row] + 1;
  }
  if (entries < kEntriesPerThread) {
    for (int64_t row = 0; row < call.rows; ++row) penalize_row(call, row);
    return;
  }
  const int64_t grain = std::max<int64_t>(1, call.rows * kEntriesPerThread / entries);
  parallel_for(call.rows, grain, [&](int64_t row) { penalize_row(call, row); });
}

}  // namespace fastspec::cpu
