#include <atomic>

#include "cuda/draw.cuh"
#include "cuda/plan.h"

namespace fastspec::cuda {
namespace {

static_assert(sizeof(TeamMemory) <= kFixedSharedBytes);
static_assert(sizeof(TeamMemory) % sizeof(uint4) == 0);

// The tree of one sequence, as seen by every thread of its team.
class Tree {
 public:
  __device__ Tree(const VerifyTreeCall& call, int64_t index)
      : call_(call), index_(index), sampling_(sampling_at(call.parameters, index)) {
    first_row_ = __ldg(call.cu_rows + index);
    num_ = smaller(__ldg(call.cu_rows + index + 1) - first_row_, call.num_nodes);
  }

  __device__ bool present() const { return num_ > 0; }
  __device__ int64_t num() const { return num_; }
  __device__ const Sampling& sampling() const { return sampling_; }
  __device__ bool drawn() const { return call_.draft.data != nullptr && !sampling_.greedy(); }

  __device__ bool has_row(int64_t node) const {
    return first_row_ >= 0 && first_row_ + node < call_.target.num_rows;
  }
  __device__ Row target_row(int64_t node) const { return row_of(call_.target, first_row_ + node); }
  __device__ DraftRow draft_row(int64_t node) const {
    const Row row = row_of(call_.draft, node, index_ * call_.draft_batch_stride);
    return {row, call_.draft_token_map, call_.target.size};
  }

  __device__ bool is_child(int64_t child, int64_t node) const {
    return __ldg(call_.parents + index_ * call_.num_nodes + child) == node;
  }
  __device__ int64_t token(int64_t node) const {
    return __ldg(call_.tree_token_ids + index_ * call_.num_nodes + node);
  }
  __device__ float uniform(int64_t i) const {
    return __ldg(call_.uniform_samples + index_ * (call_.num_nodes + 1) + i);
  }

  // The first node in [begin, end) for which holds(node), or end. For whole warps.
  template <class Holds>
  __device__ int64_t find(int64_t begin, int64_t end, const Holds& holds) const {
    for (int64_t base = begin; base < end; base += kWarp) {
      const int64_t node = base + threadIdx.x % kWarp;
      const unsigned found = __ballot_sync(kAllLanes, node < end && holds(node));
      if (found != 0) return base + __ffs(found) - 1;
    }
    return end;
  }

  // The child of a node that comes after another one, or num().
  __device__ int64_t next_child(int64_t node, int64_t after) const {
    return find(after + 1, num_, [&](int64_t child) { return is_child(child, node); });
  }

  // Whether a sibling in front of this child has the same token.
  __device__ bool is_repeated(int64_t node, int64_t child) const {
    const int64_t own = token(child);
    return find(node + 1, child, [&](int64_t other) {
             return is_child(other, node) && token(other) == own;
           }) < child;
  }

  __device__ bool has_child_with(int64_t node, int64_t own) const {
    for (int64_t child = node + 1; child < num_; ++child) {
      if (is_child(child, node) && token(child) == own) return true;
    }
    return false;
  }

 private:
  const VerifyTreeCall& call_;
  int64_t index_;
  Sampling sampling_;
  int64_t first_row_;
  int64_t num_;  // of the nodes that have a row
};

// A hash of the tokens of a node's children, one bit each, in the histogram's memory.
class ChildBits {
 public:
  __device__ explicit ChildBits(const Team& team)
      : words_(reinterpret_cast<unsigned*>(team.memory().bins)) {}

  __device__ void fill(const Tree& tree, int64_t node) const {
    for (int i = threadIdx.x; i < kWords; i += blockDim.x) words_[i] = 0;
    __syncthreads();
    for (int64_t child = node + 1 + threadIdx.x; child < tree.num(); child += blockDim.x) {
      if (!tree.is_child(child, node)) continue;
      const uint32_t token = static_cast<uint32_t>(tree.token(child));
      atomicOr(words_ + token / 32 % kWords, 1u << (token % 32));
    }
    __syncthreads();
  }

  __device__ __forceinline__ bool may_have(int64_t token) const {
    const uint32_t bits = static_cast<uint32_t>(token);
    return (words_[bits / 32 % kWords] >> (bits % 32) & 1) != 0;
  }

 private:
  static constexpr int kWords = 2 * kBins;
  unsigned* words_;
};

// The row itself without the tokens of a node's children.
struct WithoutChildren {
  Weighting weighting;
  const Tree& tree;
  int64_t node;
  ChildBits bits;
  bool enabled;

  __device__ __forceinline__ void operator()(const float (&x)[kUnit], int64_t first,
                                             u64 (&weights)[kUnit]) const {
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
      const int64_t token = first + j;
      const bool taken = enabled && bits.may_have(token) && tree.has_child_with(node, token);
      weights[j] = taken ? 0 : weighting.fixed(x[j]);
    }
  }
};

// The decisions at one node. After some children were rejected, the remaining target is
// max(target - draft_share * draft, 0) / mass; another rejected child that the draft proposed with
// probability proposed * draft adds proposed * mass to the share.
template <bool kStaged>
class NodeVerifier {
 public:
  __device__ NodeVerifier(Team& team, const VerifyTreeCall& call, const Tree& tree, int64_t node)
      : team_(team), call_(call), tree_(tree), node_(node) {}

  // Reads the rows of the node; false if one is invalid. The target's is last, so it stays staged.
  __device__ bool read() {
    if (!tree_.has_row(node_)) return false;
    const bool reads_draft = tree_.drawn() && tree_.next_child(node_, node_) < tree_.num();
#pragma unroll 1
    for (int model = reads_draft ? 0 : 1; model < 2; ++model) {
      const Row row = model == 0 ? tree_.draft_row(node_).row : tree_.target_row(node_);
      target_ = row_statistics(team_, RowView<kStaged>(team_, row), tree_.sampling());
      if (!target_.valid) return false;
      if (model == 0) draft_ = target_;
    }
    return true;
  }

  // The accepted child, or num().
  __device__ int64_t accepted_child() {
    if (tree_.sampling().greedy()) {
      return tree_.find(node_ + 1, tree_.num(), [&](int64_t child) {
        return tree_.is_child(child, node_) && tree_.token(child) == target_.argmax;
      });
    }
    return tree_.drawn() ? accepted_of_drawn() : accepted_by_mass();
  }

  __device__ int64_t extra_token() {
    if (tree_.sampling().greedy()) return target_.argmax;
    const RowView<kStaged> view(team_, tree_.target_row(node_));
    const Weighting weighting = weighting_of(target_, tree_.sampling());
    const float sample = tree_.uniform(call_.num_nodes);
    if (draft_share_ > 0) {
      const int64_t token = draw(team_, view, sample, residual(draft_share_));
      if (token >= 0) return token;
    }
    const ChildBits bits(team_);
    bool without_children = !tree_.drawn();
    if (without_children) bits.fill(tree_, node_);
    int64_t token = -1;
    while (token < 0) {
      const WithoutChildren weights{weighting, tree_, node_, bits, without_children};
      token = draw(team_, view, sample, weights);
      without_children = false;
    }
    return token;
  }

  __device__ float logprob_of(int64_t token) const {
    return logprob(target_, tree_.sampling(), logit_at(tree_.target_row(node_), token));
  }

 private:
  __device__ double target_prob(int64_t token) const {
    return probability(target_, tree_.sampling(), logit_at(tree_.target_row(node_), token));
  }

  __device__ float draft_logit(int64_t token) const {
    const DraftRow row = tree_.draft_row(node_);
    return logit_at(row.row, row.column(token));
  }

  __device__ int64_t accepted_by_mass() const {
    double mass = 0.0;
    int64_t child = node_;
    while ((child = tree_.next_child(node_, child)) < tree_.num()) {
      if (tree_.is_repeated(node_, child)) continue;
      const double prob = target_prob(tree_.token(child));
      mass += prob;
      if (prob > 0 && tree_.uniform(node_) < mass) return child;
    }
    return tree_.num();
  }

  __device__ int64_t accepted_of_drawn() {
    const bool removes = call_.rule == SiblingRule::kWithoutReplacement;
    double mass = 1.0;
    u64 draft_left = draft_.total;
    int64_t child = node_;
    while ((child = tree_.next_child(node_, child)) < tree_.num()) {
      const int64_t token = tree_.token(child);
      const float y = draft_logit(token);
      const bool removed = removes && tree_.is_repeated(node_, child);
      const double proposed =
          draft_left == 0 ? 0.0
                          : static_cast<double>(draft_.total) / static_cast<double>(draft_left);
      const double draft_prob = probability(draft_, tree_.sampling(), y);
      const double rest = (target_prob(token) - draft_share_ * draft_prob) / mass;
      const double left = rest > 0 ? rest : 0.0;
      if (tree_.uniform(child) * (removed ? 0.0 : proposed * draft_prob) < left) return child;

      const double share = draft_share_ + proposed * mass;
      const RowView<kStaged> view(team_, tree_.target_row(node_));
      const u64 remaining = total_of(team_, view, residual(share));
      if (remaining > 0) {
        draft_share_ = share;
        mass = static_cast<double>(remaining) / kMassOne;
      }
      if (removes && !removed) draft_left -= weighting_of(draft_, tree_.sampling()).fixed(y);
    }
    return tree_.num();
  }

  __device__ ResidualWeights residual(double draft_share) const {
    return {weighting_of(target_, tree_.sampling()), static_cast<float>(unit_of(target_)),
            weighting_of(draft_, tree_.sampling()),
            static_cast<float>(draft_share * unit_of(draft_)), tree_.draft_row(node_)};
  }

  Team& team_;
  const VerifyTreeCall& call_;
  const Tree& tree_;
  int64_t node_;
  RowStatistics target_ = {}, draft_ = {};
  double draft_share_ = 0.0;
};

// A team per sequence walks down from the root and reads only rows on its path: the next one only
// once its node is accepted.
template <bool kStaged>
__global__ void __launch_bounds__(kMaxThreads, 1)
    verify_tree_kernel(const VerifyTreeCall call, const int32_t cluster) {
  Team team(cluster);
  const int64_t first = team.index() * call.num_nodes;
  const Tree tree(call, team.index());
  const bool writes = team.rank() == 0 && threadIdx.x == 0;
  bool valid = true;
  int64_t node = 0, length = 0, emitted = 0;
  while (tree.present() && node < tree.num()) {
    NodeVerifier<kStaged> verifier(team, call, tree, node);
    valid = verifier.read();
    if (!valid) break;
    const int64_t child = verifier.accepted_child();
    const bool goes_on = child < tree.num();
    const int64_t token = goes_on ? tree.token(child) : verifier.extra_token();
    if (writes) {
      if (goes_on) call.path[first + length] = static_cast<int32_t>(child);
      call.output_token_ids[first + length] = static_cast<int32_t>(token);
      call.logprobs[first + length] = verifier.logprob_of(token);
    }
    if (goes_on) ++length;
    ++emitted;
    node = child;
  }
  if (!valid) length = emitted = 0;
  team.sync();  // padding must be written after what it may replace
  if (team.rank() != 0) return;
  for (int64_t i = threadIdx.x; i < call.num_nodes; i += blockDim.x) {
    if (i >= length) call.path[first + i] = -1;
    if (i < emitted) continue;
    call.output_token_ids[first + i] = -1;
    call.logprobs[first + i] = 0.0f;
  }
  if (writes) call.accepted_len[team.index()] = valid ? static_cast<int32_t>(length) : -1;
}

// Allows the kernel's blocks to use all shared memory of the current device: once per device, and
// never reduced, because another thread may be about to launch.
cudaError_t allow_all_shared_memory() {
  static std::atomic<uint64_t> allowed{0};  // a bit per device
  int device = 0, bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (error != cudaSuccess || (allowed.load(std::memory_order_acquire) & bit) != 0) return error;
  error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(reinterpret_cast<const void*>(verify_tree_kernel<true>),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) allowed.fetch_or(bit, std::memory_order_release);
  return error;
}

}  // namespace

cudaError_t image_of_verify_tree(Image* image) {
  cudaFuncAttributes found = {};
  const cudaError_t error =
      cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(verify_tree_kernel<false>));
  *image = {found.ptxVersion, found.binaryVersion};
  return error;
}

// A cluster of plan.cluster blocks for each sequence, with room for a row if plan.staged.
cudaError_t launch_verify_tree(const VerifyTreeCall& call, const Plan& plan, cudaStream_t stream) {
  if (call.batch == 0) return cudaSuccess;  // an empty grid is a launch error
  int64_t shared = sizeof(TeamMemory);
  if (plan.staged) {
    const RowShape row = larger_of(shape_of(call.target), shape_of(call.draft));
    shared += staged_bytes(row, plan.cluster, plan.threads);
    const cudaError_t error = allow_all_shared_memory();
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = plan.cluster;
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(call.batch * plan.cluster));
  config.blockDim = dim3(static_cast<unsigned>(plan.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = plan.cluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config,
                            plan.staged ? verify_tree_kernel<true> : verify_tree_kernel<false>,
                            call, plan.cluster);
}

}  // namespace fastspec::cuda
