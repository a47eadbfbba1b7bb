// Inverse-CDF draws from weights that are recomputed instead of stored.
#pragma once
#include "cuda/statistics.cuh"

namespace fastspec::cuda {

// Draws the lowest token whose cumulative weight exceeds a bound, or returns -1 if all weights are
// 0. weigh(logits of a unit, first token, weights) is called with the row's units.
template <class View, class Weigh>
class Draw {
 public:
  __device__ Draw(Team& team, const View& view, const Weigh& weigh)
      : team_(team), view_(view), weigh_(weigh) {}

  __device__ u64 total() const {
    u64 sum = 0;
    view_.pass([&](const float (&x)[kUnit], int64_t token) { sum += sum_of(x, token); });
    return sum;
  }

  // bound_of(total) < total.
  template <class BoundOf>
  __device__ int64_t token(const BoundOf& bound_of) const {
    const WarpShare share = team_.share(total());
    if (share.total == 0) return -1;
    const u64 bound = bound_of(share.total);
    if (share.before <= bound && bound < share.before + share.own) find(bound - share.before);
    team_.sync();
    return team_.memory().token;
  }

 private:
  __device__ u64 sum_of(const float (&x)[kUnit], int64_t token) const {
    u64 weights[kUnit];
    weigh_(x, token, weights);
    u64 sum = 0;
#pragma unroll
    for (int j = 0; j < kUnit; ++j) sum += weights[j];
    return sum;
  }

  // The token, found by the warp that has it, 32 units at a time.
  __device__ void find(u64 bound) const {
    for (int64_t first = view_.begin(); first < view_.end(); first += kWarp) {
      const int64_t unit = first + team_.lane();
      u64 weights[kUnit] = {}, sum = 0;
      if (unit < view_.end()) {
        float x[kUnit];
        view_.read(unit, x);
        weigh_(x, view_.first_token(unit), weights);
      }
#pragma unroll
      for (int j = 0; j < kUnit; ++j) sum += weights[j];
      const u64 inclusive = team_.warp_scan(sum);
      const unsigned passed = __ballot_sync(kAllLanes, inclusive > bound);
      if (passed != 0) {
        if (team_.lane() == __ffs(passed) - 1) {
          announce(view_.first_token(unit), weights, bound - (inclusive - sum));
        }
        return;
      }
      bound -= __shfl_sync(kAllLanes, inclusive, kWarp - 1);
    }
  }

  __device__ void announce(int64_t token, const u64 (&weights)[kUnit], u64 bound) const {
    int64_t found = token;
    bool searching = true;
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
      searching = searching && weights[j] <= bound;
      if (searching) {
        bound -= weights[j];
        ++found;
      }
    }
    for (int rank = 0; rank < team_.size(); ++rank) {
      *team_.of_block(&team_.memory().token, rank) = found;
    }
  }

  Team& team_;
  const View& view_;
  const Weigh& weigh_;
};

template <class View, class Weigh>
__device__ int64_t draw(Team& team, const View& view, float sample, const Weigh& weigh) {
  return Draw<View, Weigh>(team, view, weigh).token([&](u64 total) {
    return share_rounded_down(sample, total);
  });
}

// The sum of the weights over the whole row.
template <class View, class Weigh>
__device__ u64 total_of(Team& team, const View& view, const Weigh& weigh) {
  const u64 sum = Draw<View, Weigh>(team, view, weigh).total();
  return team.all_reduce(sum, u64{0}, [](u64 a, u64 b) { return a + b; });
}

// Draft probabilities by target token.
struct DraftRow {
  Row row;
  const int32_t* token_map;  // [vocab] or null
  int64_t vocab;             // of the target

  __device__ int64_t column(int64_t token) const {
    if (token < 0 || token >= vocab) return -1;
    return token_map == nullptr ? token : __ldg(token_map + token);
  }

  // The logits of kUnit target tokens from `first` on; -inf if the drafter has none.
  __device__ __forceinline__ void read(int64_t first, float (&x)[kUnit]) const {
    const bool whole = token_map == nullptr && first >= 0 && first + kUnit <= row.size;
    if (whole && is_aligned(address_of(row, first))) {
      load_unit(address_of(row, first), is_wide(row.element)).unpack(row.element, x);
      return;
    }
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
      const int64_t at = column(first + j);
      const bool known = at >= 0 && at < row.size;
      x[j] = known ? widen(bits_at(row, at), row.element) : -infinity();
    }
  }
};

// max(target_factor * target - draft_factor * draft, 0) of weights. The products are rounded
// separately, so that equal rows leave nothing.
struct ResidualWeights {
  Weighting target;
  float target_factor;
  Weighting draft;
  float draft_factor;
  DraftRow draft_row;

  __device__ __forceinline__ void operator()(const float (&x)[kUnit], int64_t first,
                                             u64 (&weights)[kUnit]) const {
    float y[kUnit];
    draft_row.read(first, y);
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
      const float rest = __fsub_rn(__fmul_rn(target.weight(x[j]), target_factor),
                                   __fmul_rn(draft.weight(y[j]), draft_factor));
      weights[j] = to_fixed(fmaxf(rest, 0.0f), kMassOne);
    }
  }
};

// The factor that turns a weight of a row into a probability.
__device__ __forceinline__ double unit_of(const RowStatistics& row) {
  return kWeightOne / static_cast<double>(row.total);
}

}  // namespace fastspec::cuda
