#include "cuda/draw.cuh"
#include "cuda/launch.cuh"

namespace fastspec::cuda {
namespace {

constexpr int32_t kDecisionThreads = 256;  // more would have too few registers each

// One sequence, as every thread of its team sees it.
class Chain {
 public:
  __device__ Chain(const VerifyChainCall& call, int64_t index)
      : call_(call), index_(index), sampling_(sampling_at(call.parameters, index)) {
    first_row_ = __ldg(call.cu_rows + index);
    const int64_t rows = __ldg(call.cu_rows + index + 1) - first_row_;
    present_ = rows > 0;
    const int64_t limit = smaller(call.num_draft, rows - 1);
    while (num_proposals_ < limit && proposal(num_proposals_) >= 0) ++num_proposals_;
  }

  __device__ bool present() const { return present_; }
  __device__ int64_t num_proposals() const { return num_proposals_; }
  __device__ const Sampling& sampling() const { return sampling_; }

  // Whether the rows of the drafter matter, and are judged before all else.
  __device__ bool drawn() const { return call_.draft.data != nullptr && !sampling_.greedy(); }
  __device__ bool draft_first() const { return drawn() && call_.draft_logsumexp == nullptr; }

  __device__ int64_t proposal(int64_t i) const {
    return __ldg(call_.draft_token_ids + index_ * call_.num_draft + i);
  }
  __device__ float uniform(int64_t i) const {
    return __ldg(call_.uniform_samples + index_ * (call_.num_draft + 1) + i);
  }
  __device__ float draft_logsumexp(int64_t i) const {
    return __ldg(call_.draft_logsumexp + index_ * call_.num_draft + i);
  }

  __device__ bool has_row(int64_t i) const {
    return first_row_ >= 0 && first_row_ + i < call_.target.num_rows;
  }
  __device__ Row target_row(int64_t i) const { return row_of(call_.target, first_row_ + i); }
  __device__ DraftRow draft_row(int64_t i) const {
    const Row row = row_of(call_.draft, i, index_ * call_.draft_batch_stride);
    return {row, call_.draft_token_map, call_.target.size};
  }

  // The places of the statistics; one wide row per sequence.
  __device__ RowStatistics* target(int64_t i) const {
    return call_.statistics + index_ * (2 * call_.num_draft + 1) + i;
  }
  __device__ RowStatistics* draft(int64_t i) const { return target(call_.num_draft + 1 + i); }

 private:
  const VerifyChainCall& call_;
  int64_t index_;
  Sampling sampling_;
  int64_t first_row_;
  bool present_;
  int64_t num_proposals_ = 0;
};

// A team for each target row, then one for each draft row; those that nobody needs leave at once.
template <bool kStaged>
__global__ void __launch_bounds__(kMaxThreads, 1)
    chain_statistics_kernel(const VerifyChainCall call, const int32_t cluster) {
  Team team(cluster);
  const int64_t rows = 2 * call.num_draft + 1;
  const Chain chain(call, team.index() / rows);
  const int64_t i = team.index() % rows, draft = i - call.num_draft - 1;
  if (!chain.present()) return;
  if (draft >= 0 ? !chain.draft_first() || draft >= chain.num_proposals()
                 : i > chain.num_proposals()) {
    return;
  }
  RowStatistics found = {};
  if (draft >= 0 || chain.has_row(i)) {
    const Row row = draft >= 0 ? chain.draft_row(draft).row : chain.target_row(i);
    found = row_statistics(team, RowView<kStaged>(team, row), chain.sampling());
  }
  if (team.rank() == 0 && threadIdx.x == 0) *chain.target(i) = found;
  team.sync();  // nobody leaves while another block may read its shared memory
}

// What one position makes of its proposal.
struct Judgement {
  double target_prob, draft_prob;
  bool valid;  // without the look at the whole draft row
};

struct Verdict {
  bool valid;
  int64_t accepted;
  double scale;  // of the target in the residual distribution
};

class ChainVerifier {
 public:
  __device__ ChainVerifier(Team& team, const VerifyChainCall& call, const Chain& chain)
      : team_(team), call_(call), chain_(chain), num_(chain.num_proposals()) {}

  __device__ Verdict verdict() {
    const int64_t invalid = first_invalid_row();
    num_ = smaller(num_, invalid);  // the text fails if it gets there
    Verdict found = chain_.sampling().greedy() ? greedy_verdict()
                    : call_.block              ? block_verdict()
                                               : standard_verdict();
    if (found.accepted == invalid) found.valid = false;
    return found;
  }

  // The token after the accepted ones; -1 if the draft row that this needs is invalid.
  __device__ int64_t extra_token(const Verdict& verdict) {
    const int64_t at = verdict.accepted;
    const RowStatistics row = *chain_.target(at);
    if (chain_.sampling().greedy()) return row.argmax;
    const RowView<false> view(team_, chain_.target_row(at));
    const float sample = chain_.uniform(call_.num_draft);
    int64_t token = -1, removed = -1;
    if (at < num_ && chain_.drawn()) {
      const RowStatistics draft = draft_statistics(at);
      if (!draft.valid) return -1;
      token = draw(team_, view, sample, residual_at(at, verdict.scale, draft));
    } else if (at < num_ && verdict.scale > 0) {
      removed = chain_.proposal(at);
    }
    while (token < 0) {
      token =
          draw(team_, view, sample, WithoutToken{weighting_of(row, chain_.sampling()), removed});
      removed = -1;
    }
    return token;
  }

 private:
  // Calls holds(i) for each i < count, spread over the lanes; the first i that fails, or count.
  template <class Holds>
  __device__ int64_t first_failure(int64_t count, const Holds& holds) const {
    for (int64_t base = 0; base < count; base += kWarp) {
      const int64_t i = base + team_.lane();
      const unsigned failed = __ballot_sync(kAllLanes, i < count && !holds(i));
      if (failed != 0) return base + __ffs(failed) - 1;
    }
    return count;
  }

  // The first position whose target or draft row is invalid, or one that no chain gets to.
  __device__ int64_t first_invalid_row() const {
    return first_failure(num_ + 1, [&](int64_t i) {
      const bool has_draft = chain_.draft_first() && i < num_;
      return chain_.target(i)->valid != 0 && (!has_draft || chain_.draft(i)->valid != 0);
    });
  }

  __device__ double target_prob(int64_t i) const {
    const float x = logit_at(chain_.target_row(i), chain_.proposal(i));
    return probability(*chain_.target(i), chain_.sampling(), x);
  }

  __device__ Judgement judge(int64_t i) const {
    const int64_t token = chain_.proposal(i);
    Judgement found = {target_prob(i), token < call_.target.size ? 1.0 : 0.0, true};
    if (!chain_.drawn()) return found;
    const DraftRow draft = chain_.draft_row(i);
    const float y = logit_at(draft.row, draft.column(token));
    if (call_.draft_logsumexp == nullptr) {
      found.draft_prob = probability(*chain_.draft(i), chain_.sampling(), y);
      return found;
    }
    const float logsumexp = chain_.draft_logsumexp(i);
    const double scaled = static_cast<double>(y) / chain_.sampling().temperature;
    found.draft_prob = y == -infinity() ? 0.0 : exp(scaled - static_cast<double>(logsumexp));
    found.valid = fabsf(logsumexp) < infinity() && found.draft_prob < infinity();
    return found;
  }

  __device__ Verdict greedy_verdict() const {
    const int64_t accepted = first_failure(
        num_, [&](int64_t i) { return chain_.proposal(i) == chain_.target(i)->argmax; });
    return {true, accepted, 1.0};
  }

  // Up to the first rejection, or to the first position that is invalid.
  __device__ Verdict standard_verdict() const {
    for (int64_t base = 0; base < num_; base += kWarp) {
      const int64_t i = base + team_.lane();
      Judgement found = {1.0, 0.0, true};
      if (i < num_) found = judge(i);
      const double coin = i < num_ ? chain_.uniform(i) * found.draft_prob : 0.0;
      const bool accepts = found.valid && coin < call_.lenience * found.target_prob;
      const unsigned stopped = __ballot_sync(kAllLanes, !accepts);
      const unsigned invalid = __ballot_sync(kAllLanes, !found.valid);
      if (stopped == 0) continue;
      const int lane = __ffs(stopped) - 1;
      return {(invalid >> lane & 1) == 0, base + lane, 1.0};
    }
    return {true, num_, 1.0};
  }

  // What multiplies the target's probabilities after `length` accepted proposals.
  __device__ double block_scale(int64_t length) const {
    double scale = 1.0;
    for (int64_t base = 0; base < length; base += kWarp) {
      Judgement own = {1.0, 0.0, true};
      if (base + team_.lane() < length) own = judge(base + team_.lane());
      for (int i = 0; i < kWarp && base + i < length; ++i) {
        const double grown = scale * __shfl_sync(kAllLanes, own.target_prob, i);
        const double draft_prob = __shfl_sync(kAllLanes, own.draft_prob, i);
        scale = grown < draft_prob ? grown / draft_prob : grown > 0 ? 1.0 : 0.0;
      }
    }
    return scale;
  }

  // The mass of the residual distribution at position i before it is normalised.
  __device__ double residual_mass(int64_t i, double scale) {
    if (scale == 0) return 0.0;
    if (!chain_.drawn()) return scale * (1.0 - target_prob(i));
    const ResidualWeights residual = residual_at(i, scale, *chain_.draft(i));
    const RowView<false> view(team_, chain_.target_row(i));
    return static_cast<double>(total_of(team_, view, residual)) / kMassOne;
  }

  __device__ Verdict block_verdict() {
    for (int64_t length = num_; length > 0; --length) {
      const double scale = block_scale(length);
      double bound = scale;
      if (length < num_) {
        const double rest = residual_mass(length, scale), whole = rest + 1.0 - scale;
        bound = whole > 0 ? rest / whole : 1.0;
      }
      if (chain_.uniform(length - 1) < bound) return {true, length, scale};
    }
    return {true, 0, 1.0};
  }

  __device__ RowStatistics draft_statistics(int64_t i) {
    if (call_.draft_logsumexp == nullptr) return *chain_.draft(i);
    return row_statistics(team_, RowView<false>(team_, chain_.draft_row(i).row), chain_.sampling());
  }

  // The weights of max(scale * target - draft, 0), or of the lenient rule, below 1.
  __device__ ResidualWeights residual_at(int64_t i, double scale, const RowStatistics& draft) {
    const RowStatistics target = *chain_.target(i);
    double draft_unit = unit_of(draft);
    if (call_.draft_logsumexp != nullptr) {
      const double best = static_cast<double>(draft.max) / chain_.sampling().temperature;
      draft_unit = exp(best - static_cast<double>(chain_.draft_logsumexp(i)));
    }
    return {weighting_of(target, chain_.sampling()), static_cast<float>(scale * unit_of(target)),
            weighting_of(draft, chain_.sampling()), static_cast<float>(draft_unit / call_.lenience),
            chain_.draft_row(i)};
  }

  Team& team_;
  const VerifyChainCall& call_;
  const Chain& chain_;
  int64_t num_;
};

// The accepted proposals, the extra token, then padding; nothing but padding if it is -1.
__device__ void write_chain(const VerifyChainCall& call, const Chain& chain, int64_t index,
                            int64_t accepted, int64_t extra) {
  const int64_t width = call.num_draft + 1;
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
    int64_t token = -1;
    float value = 0.0f;
    if (extra >= 0 && i <= accepted) {
      token = i < accepted ? chain.proposal(i) : extra;
      value = logprob(*chain.target(i), chain.sampling(), logit_at(chain.target_row(i), token));
    }
    call.output_token_ids[index * width + i] = static_cast<int32_t>(token);
    call.logprobs[index * width + i] = value;
  }
  if (threadIdx.x == 0) {
    const int64_t result = extra >= 0 ? accepted : chain.present() ? -1 : 0;
    call.accepted_len[index] = static_cast<int32_t>(result);
  }
}

// A team per sequence: every warp judges the proposals for itself, from scalars; then one pass over
// the row of the first rejection, or of the bonus token, draws the extra token.
__global__ void __launch_bounds__(kDecisionThreads, 1)
    verify_chain_kernel(const VerifyChainCall call, const int32_t cluster) {
  Team team(cluster);
  const Chain chain(call, team.index());
  Verdict verdict = {false, 0, 1.0};
  int64_t extra = -1;
  if (chain.present()) {
    ChainVerifier verifier(team, call, chain);
    verdict = verifier.verdict();
    if (verdict.valid) extra = verifier.extra_token(verdict);
  }
  if (team.rank() == 0) write_chain(call, chain, team.index(), verdict.accepted, extra);
  team.sync();
}

}  // namespace

cudaError_t image_of_verify_chain(Image* image) { return image_of(verify_chain_kernel, image); }

cudaError_t launch_verify_chain(const VerifyChainCall& call, const Plan& rows,
                                const Plan& sequences, cudaStream_t stream) {
  const RowShape shape = larger_of(shape_of(call.target), shape_of(call.draft));
  const cudaError_t error =
      launch_teams<chain_statistics_kernel<true>, chain_statistics_kernel<false>>(
          call.batch * (2 * call.num_draft + 1), rows, shape, stream, call);
  if (error != cudaSuccess) return error;
  Plan plan = sequences;
  if (plan.threads > kDecisionThreads) plan.threads = kDecisionThreads;
  return launch_teams<verify_chain_kernel, verify_chain_kernel>(call.batch, plan, shape, stream,
                                                                call);
}

}  // namespace fastspec::cuda
