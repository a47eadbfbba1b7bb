#include "cuda/launch.cuh"
#include "cuda/tiles.cuh"

namespace fastspec::cuda {
namespace {

constexpr int32_t kDecisionThreads = 256;  // more would have too few registers each
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kDecisionBlocks = 1;  // of a multiprocessor; with more, registers spill
#else
constexpr int kDecisionBlocks = 2;  // 64 sequences of 4 blocks each are one wave
#endif

// One sequence, as every thread of its team sees it.
class Chain {
 public:
  __device__ Chain(const VerifyChainCall& call, int64_t index)
      : call_(call), index_(index), sampling_(sampling_at(call.parameters, index)) {
    first_row_ = __ldg(call.cu_rows + index);
    const int64_t rows = __ldg(call.cu_rows + index + 1) - first_row_;
    present_ = rows > 0;
    const int64_t limit = smaller(call.num_draft, rows - 1);
    unsigned ended = 0;  // whole warps look for the padding
    for (int64_t base = 0; base < limit && ended == 0; base += kWarp) {
      const int64_t i = base + threadIdx.x % kWarp;
      ended = __ballot_sync(kAllLanes, i >= limit || proposal(i) < 0);
      num_proposals_ = base + (ended != 0 ? __ffs(ended) - 1 : kWarp);
    }
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

  // Row i of 2K + 1: those of the target, then those of the drafter.
  __device__ bool is_needed(int64_t i) const {
    const int64_t draft = i - call_.num_draft - 1;
    return present_ && (draft < 0 ? i <= num_proposals_ : draft_first() && draft < num_proposals_);
  }
  __device__ bool is_there(int64_t i) const { return i > call_.num_draft || has_row(i); }
  __device__ Row row(int64_t i) const {
    return i > call_.num_draft ? draft_row(i - call_.num_draft - 1).row : target_row(i);
  }

  // Whether rows are read by teams, for the filters, and not by tiles.
  __device__ bool is_filtered() const { return sampling_.filters(call_.target.size); }
  __device__ TileStatistics* tiles(int64_t i) const {
    return call_.tiles + (target(i) - call_.statistics) * call_.num_tiles;
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

// A block for each tile of rows [begin, end) of each sequence; those that nobody needs leave at
// once.
template <Element kElement>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    chain_tiles_kernel(const VerifyChainCall call, const int32_t begin, const int32_t end) {
  let_next_kernel_start();
  const Team team(1);
  const uint32_t tiles = static_cast<uint32_t>(call.num_tiles), index = blockIdx.x / tiles;
  const uint32_t tile = blockIdx.x % tiles, rows = static_cast<uint32_t>(end - begin);
  const int64_t i = begin + index % rows;
  const Chain chain(call, index / rows);
  if (!chain.is_needed(i) || chain.is_filtered() || !chain.is_there(i)) return;
  const TileStatistics found =
      tile_statistics<kElement>(team, chain.row(i), tile, chain.sampling());
  if (threadIdx.x == 0) chain.tiles(i)[tile] = found;
}

// A team for each row of a sequence with filters.
template <bool kStaged>
__global__ void __launch_bounds__(kMaxThreads, 1)
    chain_statistics_kernel(const VerifyChainCall call, const int32_t cluster) {
  Team team(cluster);
  const int64_t rows = 2 * call.num_draft + 1, i = team.index() % rows;
  const Chain chain(call, team.index() / rows);
  if (!chain.is_needed(i) || !chain.is_filtered()) return;
  RowStatistics found = {};
  if (chain.is_there(i)) {
    found = row_statistics(team, RowView<kStaged>(team, chain.row(i)), chain.sampling());
  }
  if (team.rank() == 0 && threadIdx.x == 0) *chain.target(i) = found;
  team.sync();  // nobody leaves while another block may read its shared memory
}

// Makes rows of the tiles, a warp each; every block of the team does so for itself.
__device__ void merge_rows(const Team& team, const VerifyChainCall& call, const Chain& chain) {
  const int64_t rows = 2 * call.num_draft + 1;
  for (int64_t i = team.block_warp(); i < rows; i += team.block_warps()) {
    if (!chain.is_needed(i)) continue;
    const int64_t num = chain.is_there(i) ? call.num_tiles : 0;
    const RowStatistics found = merge_tiles(team, chain.tiles(i), num, chain.sampling());
    if (team.lane() == 0) *chain.target(i) = found;
  }
  __syncthreads();
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
      token = draw_without(at, row, view, sample, removed);
      removed = -1;
    }
    return token;
  }

 private:
  // A token of a target row other than `removed`, -1 if there is none.
  __device__ int64_t draw_without(int64_t at, const RowStatistics& row, const RowView<false>& view,
                                  float sample, int64_t removed) {
    const Sampling& sampling = chain_.sampling();
    if (chain_.is_filtered()) {
      return draw(team_, view, sample, WithoutToken{weighting_of(row, sampling), removed});
    }
    return draw_from_tiles(team_, view.row(), chain_.tiles(at), call_.num_tiles, row, sampling,
                           sample, removed);
  }

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
__global__ void __launch_bounds__(kDecisionThreads, kDecisionBlocks)
    verify_chain_kernel(const VerifyChainCall call, const int32_t cluster) {
  wait_for_previous_kernel();
  Team team(cluster);
  const Chain chain(call, team.index());
  if (!chain.is_filtered()) merge_rows(team, call, chain);
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

// The tiles of rows [begin, end) of each sequence, which have logits of this type.
cudaError_t launch_tiles(const VerifyChainCall& call, Element element, int32_t begin, int32_t end,
                         cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(call.batch * (end - begin) * call.num_tiles));
  config.blockDim = dim3(kTileThreads);
  config.dynamicSmemBytes = sizeof(TileMemory);
  config.stream = stream;
  return cudaLaunchKernelEx(&config,
                            element == Element::kFloat32    ? chain_tiles_kernel<Element::kFloat32>
                            : element == Element::kBFloat16 ? chain_tiles_kernel<Element::kBFloat16>
                                                            : chain_tiles_kernel<Element::kFloat16>,
                            call, begin, end);
}

}  // namespace

cudaError_t image_of_verify_chain(Image* image) { return image_of(verify_chain_kernel, image); }

cudaError_t launch_verify_chain(const VerifyChainCall& call, const Plan& rows,
                                const Plan& sequences, cudaStream_t stream) {
  if (call.batch == 0) return cudaSuccess;  // an empty grid is a launch error
  const int32_t targets = static_cast<int32_t>(call.num_draft) + 1, all = 2 * targets - 1;
  const bool reads_drafts =
      call.draft.data != nullptr && call.draft_logsumexp == nullptr && call.num_draft > 0;
  const bool together = reads_drafts && call.draft.element == call.target.element;
  cudaError_t error = launch_tiles(call, call.target.element, 0, together ? all : targets, stream);
  if (error == cudaSuccess && reads_drafts && !together) {
    error = launch_tiles(call, call.draft.element, targets, all, stream);
  }
  const RowShape shape = larger_of(shape_of(call.target), shape_of(call.draft));
  const SamplingParameters& filters = call.parameters;
  if (error == cudaSuccess && (filters.top_k || filters.top_p || filters.min_p)) {
    error = launch_teams<chain_statistics_kernel<true>, chain_statistics_kernel<false>>(
        call.batch * all, rows, shape, stream, call);
  }
  if (error != cudaSuccess) return error;
  Plan plan = sequences;
  if (plan.threads > kDecisionThreads) plan.threads = kDecisionThreads;
  return launch_teams<verify_chain_kernel, verify_chain_kernel, true>(call.batch, plan, shape,
                                                                      stream, call);
}

}  // namespace fastspec::cuda
