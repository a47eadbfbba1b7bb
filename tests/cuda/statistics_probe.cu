// The passes of row_statistics by themselves, with the type of the logits known, so that the
// instructions of their loops can be counted.
#include "cuda/statistics.cuh"

namespace cuda = fastspec::cuda;

namespace {

// Keeps the dispatch on the type of the logits out of the loops.
template <cuda::Element kElement>
__device__ cuda::Row typed(const void* data, int64_t size) {
  return {data, nullptr, size, kElement};
}

template <cuda::Element kElement>
__device__ void find_best(const void* data, int64_t size, float* out) {
  cuda::Team team(1);
  const cuda::RowView<false> view(team, typed<kElement>(data, size));
  float best = -cuda::infinity();
  view.first_pass([&](const float (&x)[cuda::kUnit], int64_t) {
#pragma unroll
    for (int j = 0; j < cuda::kUnit; ++j) best = cuda::max_or_nan(best, x[j]);
  });
  out[threadIdx.x] = best;
}

template <cuda::Element kElement>
__device__ void sum_staged(const void* data, int64_t size, cuda::Weighting weighting,
                           cuda::u64* out) {
  cuda::Team team(1);
  const cuda::RowView<true> view(team, typed<kElement>(data, size));
  cuda::u64 sum = 0;
  view.pass([&](const float (&x)[cuda::kUnit], int64_t) {
#pragma unroll
    for (int j = 0; j < cuda::kUnit; ++j) sum += weighting.fixed(x[j]);
  });
  out[threadIdx.x] = sum;
}

}  // namespace

extern "C" __global__ void best_float32(const void* data, int64_t size, float* out) {
  find_best<cuda::Element::kFloat32>(data, size, out);
}
extern "C" __global__ void best_bfloat16(const void* data, int64_t size, float* out) {
  find_best<cuda::Element::kBFloat16>(data, size, out);
}
extern "C" __global__ void best_float16(const void* data, int64_t size, float* out) {
  find_best<cuda::Element::kFloat16>(data, size, out);
}
extern "C" __global__ void sum_float32(const void* data, int64_t size, cuda::Weighting weighting,
                                       cuda::u64* out) {
  sum_staged<cuda::Element::kFloat32>(data, size, weighting, out);
}
extern "C" __global__ void sum_bfloat16(const void* data, int64_t size, cuda::Weighting weighting,
                                        cuda::u64* out) {
  sum_staged<cuda::Element::kBFloat16>(data, size, weighting, out);
}
