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

}  // namespace

cudaError_t image_of_sampling(Image* image) { return image_of(row_stats_kernel<false>, image); }

cudaError_t launch_row_stats(const RowStatsCall& call, const Plan& plan, cudaStream_t stream) {
  return launch_teams(plan.staged ? row_stats_kernel<true> : row_stats_kernel<false>,
                      call.logits.num_rows, plan, shape_of(call.logits), stream, call,
                      plan.cluster);
}

cudaError_t launch_logits_to_probs(const LogitsToProbsCall& call, const Plan& plan,
                                   cudaStream_t stream) {
  return launch_teams(plan.staged ? logits_to_probs_kernel<true> : logits_to_probs_kernel<false>,
                      call.logits.num_rows, plan, shape_of(call.logits), stream, call,
                      plan.cluster);
}

cudaError_t launch_sample(const SampleCall& call, const Plan& plan, cudaStream_t stream) {
  return launch_teams(plan.staged ? sample_kernel<true> : sample_kernel<false>,
                      call.logits.num_rows, plan, shape_of(call.logits), stream, call,
                      plan.cluster);
}

}  // namespace fastspec::cuda
