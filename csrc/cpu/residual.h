// The residual distribution of a target's row after a draft is subtracted.
#pragma once
#include <cstdint>
#include <vector>

#include "row.h"

namespace fastspec::cpu {

// The distribution that one proposal was drawn from, by target token.
struct Draft {
  const Row* row;            // weighed; null: all the mass is on `token`
  int64_t token;             // the proposal
  const int32_t* token_map;  // column of each target token in the row, or null: the identity
  const float* known_weights = nullptr;  // of all target tokens, if `weigh` computed them before

  // The column of a target token, outside the row if the drafter does not have it.
  int64_t column(int64_t token, int64_t vocab) const {
    return token_map == nullptr || token >= vocab ? token : token_map[token];
  }
  double prob(int64_t token, int64_t vocab) const { return row->prob(column(token, vocab)); }
  // Fills out with the weights, their probabilities times row->sum, of `size` <= kChunk target
  // tokens from `begin` on; not for point masses.
  void weigh(int64_t begin, int64_t size, float* out) const;
};

// The weights max(factor * target - draft, 0) over a vocabulary, chunk by chunk.
class Residual {
 public:
  // `target` is weighed and not greedy. A point mass removes its token, whatever the factor.
  Residual(const Row& target, const Draft& draft, double factor);

  int64_t chunks() const { return target_.chunks(); }
  // The sum of one chunk's weights.
  double sum(int64_t chunk) const;
  // The sums of all chunks, computed in parallel if worthwhile.
  std::vector<double> sums() const;
  // The token of the inverse CDF, -1 if nothing remains.
  int64_t draw(const double* chunk_sums, double uniform) const;

 private:
  double weigh(int64_t chunk, float* weights) const;

  const Row& target_;
  const Draft draft_;
  double unit_ = 1;  // what `weigh` returns for a weight of 1
  float ratio_ = 1;  // of the target's weights to the draft's
};

}  // namespace fastspec::cpu
