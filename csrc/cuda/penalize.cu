#include "cuda/device.cuh"

namespace fastspec::cuda {
namespace {

constexpr int kThreads = 128;

// The tokens of the nodes from one up to the root, exclusive.
struct Path {
  const int32_t* tokens;   // of the tree
  const int32_t* parents;  // of the tree, or null: a chain
  int32_t first;

  // A parent that does not come before its node ends the path.
  __device__ __forceinline__ int32_t after(int32_t node) const {
    const int32_t parent = parents == nullptr ? node - 1 : __ldg(parents + node);
    return parent < node ? parent : 0;
  }

  __device__ int32_t depth() const {
    int32_t nodes = 0;
    for (int32_t node = first; node > 0; node = after(node)) ++nodes;
    return nodes;
  }

  __device__ int32_t token_at(int32_t place) const {
    int32_t node = first;
    for (; place > 0; --place) node = after(node);
    return __ldg(tokens + node);
  }

  // How often a token is among the first `places` nodes.
  __device__ int32_t count(int32_t token, int32_t places) const {
    int32_t found = 0;
    for (int32_t node = first; node > 0 && places > 0; node = after(node), --places) {
      found += __ldg(tokens + node) == token;
    }
    return found;
  }
};

// One sequence's part of a list with ascending ids.
struct Ids {
  const int32_t* ids;
  int32_t begin, end;

  __device__ Ids(const int32_t* sums, const int32_t* all, int32_t b)
      : ids(all), begin(__ldg(sums + b)), end(__ldg(sums + b + 1)) {}

  // Where a token is, or -1.
  __device__ int32_t find(int32_t token) const {
    int32_t low = begin, high = end;
    while (low < high) {
      const int32_t middle = low + (high - low) / 2;
      if (__ldg(ids + middle) < token) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low < end && __ldg(ids + low) == token ? low : -1;
  }
};

struct Edit {
  float bias;  // -0 leaves the sign of a zero alone
  bool seen;
  int32_t count;
};

struct Logit {
  void* row;
  int64_t vocab;
  Element element;
  float repetition, presence, frequency;

  __device__ void change(int32_t token, const Edit& edit) const {
    if (token < 0 || token >= vocab) return;
    uint32_t* wide = static_cast<uint32_t*>(row) + token;
    uint16_t* half = static_cast<uint16_t*>(row) + token;
    float x = widen(is_wide(element) ? *wide : *half, element) + edit.bias;
    if (edit.seen) x = x > 0.0f ? x / repetition : __fmul_rn(x, repetition);
    if (edit.count > 0) {
      const float each = __fmul_rn(frequency, static_cast<float>(edit.count));
      x = __fsub_rn(x, __fadd_rn(each, presence));
    }
    if (is_wide(element)) {
      *wide = narrow(x, element);
    } else {
      *half = static_cast<uint16_t>(narrow(x, element));
    }
  }
};

__device__ __forceinline__ float at_or(const float* values, int32_t b, float otherwise) {
  return values == nullptr ? otherwise : __ldg(values + b);
}

// A block edits one row. Each token is edited where it occurs first: history, bias, path.
__global__ void __launch_bounds__(kThreads) penalize_kernel(const PenalizeCall call) {
  const int64_t row = blockIdx.x;
  const int32_t b = __ldg(call.row_sequence + row), node = __ldg(call.row_node + row);
  if (b < 0 || b >= call.batch || node < 0 || node >= call.num_nodes) return;
  const int64_t tree = b * call.num_nodes;
  const Path path = {call.tree_token_ids + tree,
                     call.parents == nullptr ? nullptr : call.parents + tree, node};
  const Ids history(call.cu_history, call.history_ids, b);
  const Ids biased(call.cu_bias, call.bias_ids, b);
  const int64_t bytes = is_wide(call.element) ? 4 : 2;
  const Logit logit = {static_cast<char*>(call.logits) + row * call.row_stride * bytes,
                       call.vocab,
                       call.element,
                       at_or(call.repetition_penalty, b, 1.0f),
                       at_or(call.presence_penalty, b, 0.0f),
                       at_or(call.frequency_penalty, b, 0.0f)};
  const int32_t depth = path.depth(), thread = static_cast<int32_t>(threadIdx.x);
  const auto is_on = [&](int32_t entry) {
    return entry >= 0 && depth < __ldg(call.bias_until + entry);
  };
  for (int32_t i = history.begin + thread; i < history.end; i += kThreads) {
    const int32_t token = __ldg(history.ids + i), entry = biased.find(token);
    logit.change(token, {is_on(entry) ? __ldg(call.bias + entry) : -0.0f, true,
                         __ldg(call.history_counts + i) + path.count(token, depth)});
  }
  for (int32_t i = biased.begin + thread; i < biased.end; i += kThreads) {
    const int32_t token = __ldg(biased.ids + i);
    if (!is_on(i) || history.find(token) >= 0) continue;
    const int32_t count = path.count(token, depth);
    logit.change(token, {__ldg(call.bias + i), count > 0, count});
  }
  for (int32_t place = thread; place < depth; place += kThreads) {
    const int32_t token = path.token_at(place);
    if (path.count(token, place) > 0 || history.find(token) >= 0 || is_on(biased.find(token))) {
      continue;
    }
    logit.change(token, {-0.0f, true, path.count(token, depth)});
  }
}

}  // namespace

cudaError_t launch_penalize(const PenalizeCall& call, cudaStream_t stream) {
  if (call.num_rows == 0) return cudaSuccess;  // an empty grid is a launch error
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(call.num_rows));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, penalize_kernel, call);
}

}  // namespace fastspec::cuda
