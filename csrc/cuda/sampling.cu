#include "common/philox.h"
#include "cuda/draw.cuh"
#include "cuda/launch.cuh"

namespace fastspec::cuda {
namespace {

// In each kernel a team handles one row: one pass to find the best logit, which also brings the row
// into shared memory if kStaged, then a few more there.

template <bool kStaged>
__global__ void __launch_bounds__(kMaxThreads, 1)
    row_stats_kernel(const RowStatsCall call, const int32_t cluster) {
  Team team(cluster);
  const int64_t index = team.index();
  const Sampling sampling = sampling_at(call.parameters, index);
  const Row row = row_of(call.logits, index);
  const RowView<kStaged> view(team, row);
  const RowStatistics found = row_statistics(team, view, sampling);
  if (team.rank() == 0 && threadIdx.x == 0) {
    const float logsumexp = found.max / sampling.scale() + log_total(found);
    call.logsumexp[index] = found.valid ? logsumexp : not_a_number();
    call.threshold[index] = found.valid ? found.threshold : not_a_number();
  }
  team.sync();  // nobody leaves while another block may read its shared memory
}

// Writes what lies inside the row of kUnit values from `first` on.
__device__ __forceinline__ void write_probs(float* row, int64_t size, int64_t first,
                                            const float (&values)[kUnit]) {
  float* out = row + first;
  const bool whole = first >= 0 && first + kUnit <= size;
  if (whole && reinterpret_cast<uintptr_t>(out) % sizeof(float4) == 0) {
#pragma unroll
    for (int j = 0; j < kUnit; j += 4) {
      *reinterpret_cast<float4*>(out + j) =
          make_float4(values[j], values[j + 1], values[j + 2], values[j + 3]);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kUnit; ++j) {
    if (first + j >= 0 && first + j < size) out[j] = values[j];
  }
}

template <bool kStaged>
__global__ void __launch_bounds__(kMaxThreads, 1)
    logits_to_probs_kernel(const LogitsToProbsCall call, const int32_t cluster) {
  Team team(cluster);
  const int64_t index = team.index();
  const Sampling sampling = sampling_at(call.parameters, index);
  const Row row = row_of(call.logits, index);
  float* out = call.probs + index * row.size;
  const RowView<kStaged> view(team, row);
  const RowStatistics found = row_statistics(team, view, sampling);
  const Weighting weighting = weighting_of(found, sampling);
  const float unit = static_cast<float>(unit_of(found));
  view.pass([&](const float (&x)[kUnit], int64_t first) {
    float values[kUnit];
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
      values[j] = weighting.weight(x[j]) * unit;
      if (sampling.greedy()) values[j] = first + j == found.argmax ? 1.0f : 0.0f;
      if (!found.valid) values[j] = not_a_number();
    }
    write_probs(out, row.size, first, values);
  });
  team.sync();
}

template <bool kStaged>
__global__ void __launch_bounds__(kMaxThreads, 1)
    sample_kernel(const SampleCall call, const int32_t cluster) {
  Team team(cluster);
  const int64_t index = team.index();
  const Sampling sampling = sampling_at(call.parameters, index);
  const Row row = row_of(call.logits, index);
  const RowView<kStaged> view(team, row);
  const RowStatistics found = row_statistics(team, view, sampling);
  int64_t token = found.argmax;
  if (found.valid && !sampling.greedy()) {
    const float uniform = __ldg(call.uniform_samples + index);
    token = draw(team, view, uniform, OwnWeights{weighting_of(found, sampling)});
  }
  if (team.rank() == 0 && threadIdx.x == 0) {
    call.token_ids[index] = static_cast<int32_t>(token);
    call.logprobs[index] =
        found.valid ? logprob(found, sampling, logit_at(row, token)) : not_a_number();
  }
  team.sync();
}

// -ln((word + 0.5) / 2^bits), to within rounding also where that is close to 0: the complement is
// exact, and what it makes is at most a half.
__device__ __forceinline__ float minus_log(uint32_t word, int bits) {
  const uint32_t half = 1u << (bits - 1);
  const bool low = word < half;
  const float one = 1.0f / (2.0f * static_cast<float>(half));
  const float share = static_cast<float>(low ? word : half + (half - 1) - word) * one + 0.5f * one;
  return low ? -logf(share) : -log1pf(-share);
}

__device__ __forceinline__ PhiloxBlock noise_block(uint64_t seed, uint64_t position,
                                                   uint32_t stream, int64_t first) {
  const uint32_t counter[4] = {static_cast<uint32_t>(position),
                               static_cast<uint32_t>(position >> 32),
                               static_cast<uint32_t>(first / 4), stream};
  return philox4x32_10(seed, counter);
}

// Gumbel-max: the key of this thread's best token, of four neighbours at a time. Keys are in the
// order of the scores, of equal ones in that of falling ids.
__device__ u64 best_with_noise(const Team& team, const Row& row, const Weighting& weighting,
                               uint64_t seed, uint64_t position) {
  u64 best = 0;
  const int64_t thread = team.warp() * kWarp + team.lane();
#pragma unroll 1
  for (int64_t first = 4 * thread; first < row.size; first += 4 * kWarp * team.num_warps()) {
    const PhiloxBlock shared =
        noise_block(seed, position, kLeastStream, group_of(static_cast<uint32_t>(first)));
    const PhiloxBlock own = noise_block(seed, position, kOthersStream, first);
    const uint32_t place = place_of(static_cast<uint32_t>(first));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float x = logit_at(row, first + j);
      if (!(x >= weighting.threshold && x > -infinity())) continue;
      float number = minus_log(shared.word[j] >> 4, 28) * (1.0f / kGroup);
      if (least_place(shared.word[j]) != place) number += minus_log(own.word[j], 32);
      const float score = weighting.log2_of(x) - log2f(number);
      const u64 key = u64{to_key(score)} << 32 | static_cast<uint32_t>(INT32_MAX - (first + j));
      best = best > key ? best : key;
    }
  }
  return best;
}

template <bool kStaged>
__global__ void __launch_bounds__(kMaxThreads, 1)
    sample_coupled_kernel(const SampleCoupledCall call, const int32_t cluster) {
  Team team(cluster);
  const int64_t index = team.index();
  const Sampling sampling = sampling_at(call.parameters, index);
  const Row row = row_of(call.logits, index);
  const RowView<kStaged> view(team, row);
  const RowStatistics found = row_statistics(team, view, sampling);
  int64_t token = found.argmax;
  if (found.valid && !sampling.greedy()) {
    const u64 own = best_with_noise(team, row, weighting_of(found, sampling),
                                    static_cast<uint64_t>(__ldg(call.seed + index)),
                                    static_cast<uint64_t>(__ldg(call.position + index)));
    const u64 best = team.all_reduce(own, u64{0}, [](u64 a, u64 b) { return a > b ? a : b; });
    token = INT32_MAX - static_cast<int64_t>(best & UINT32_MAX);
  }
  if (team.rank() == 0 && threadIdx.x == 0) {
    call.token_ids[index] = static_cast<int32_t>(token);
    call.logprobs[index] =
        found.valid ? logprob(found, sampling, logit_at(row, token)) : not_a_number();
  }
  team.sync();
}

}  // namespace

cudaError_t image_of_sampling(Image* image) { return image_of(row_stats_kernel<false>, image); }

cudaError_t launch_row_stats(const RowStatsCall& call, const Plan& plan, cudaStream_t stream) {
  return launch_teams<row_stats_kernel<true>, row_stats_kernel<false>>(
      call.logits.num_rows, plan, shape_of(call.logits), stream, call);
}

cudaError_t launch_logits_to_probs(const LogitsToProbsCall& call, const Plan& plan,
                                   cudaStream_t stream) {
  return launch_teams<logits_to_probs_kernel<true>, logits_to_probs_kernel<false>>(
      call.logits.num_rows, plan, shape_of(call.logits), stream, call);
}

cudaError_t launch_sample(const SampleCall& call, const Plan& plan, cudaStream_t stream) {
  return launch_teams<sample_kernel<true>, sample_kernel<false>>(
      call.logits.num_rows, plan, shape_of(call.logits), stream, call);
}

cudaError_t launch_sample_coupled(const SampleCoupledCall& call, const Plan& plan,
                                  cudaStream_t stream) {
  return launch_teams<sample_coupled_kernel<true>, sample_coupled_kernel<false>>(
      call.logits.num_rows, plan, shape_of(call.logits), stream, call);
}

}  // namespace fastspec::cuda
