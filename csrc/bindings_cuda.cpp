// Unpacks the tensors of the sampling and tree ops, allocates their outputs, and registers them.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <map>

#include "bindings_cuda.h"
#include "cuda/plan.h"

namespace fastspec {
namespace {

int64_t attribute_of(int device, cudaDeviceAttr attribute) {
  int value = 0;
  check_launch("device", cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

// Limits of the tensor's device, which is current. Querying a kernel's code takes microseconds, so
// each thread does so once per device.
cuda::Limits limits_of(const Tensor& tensor) {
  thread_local std::map<int, cuda::Limits> known;
  const int device = tensor.get_device_index();
  const auto found = known.find(device);
  if (found != known.end()) return found->second;
  cuda::Image image = {};
  check_launch("image", cuda::image_of_verify_tree(&image));
  const cuda::Limits limits = {
      attribute_of(device, cudaDevAttrMultiProcessorCount),
      attribute_of(device, cudaDevAttrMaxSharedMemoryPerBlockOptin),
      cuda::has_clusters(image, attribute_of(device, cudaDevAttrComputeCapabilityMajor))};
  known.emplace(device, limits);
  return limits;
}

// Whether there is kernel code for a device: machine code, or PTX that its driver can compile.
bool has_cuda_image(int64_t device) {
  const DeviceGuard guard(static_cast<torch::stable::accelerator::DeviceIndex>(device));
  cuda::Image image = {};
  const cudaError_t error = cuda::image_of_verify_tree(&image);
  for (const cudaError_t missing :
       {cudaErrorNoKernelImageForDevice, cudaErrorInvalidDeviceFunction,
        cudaErrorInvalidKernelImage, cudaErrorInvalidPtx, cudaErrorUnsupportedPtxVersion,
        cudaErrorJitCompilerNotFound, cudaErrorJitCompilationDisabled}) {
    if (error != missing) continue;
    cudaGetLastError();  // torch would attribute it to its next kernel
    return false;
  }
  check_launch("image", error);
  return true;
}

std::string cuda_architectures() { return FASTSPEC_CUDA_ARCHS; }

Tensor new_tensor(const Tensor& beside, std::initializer_list<int64_t> shape, ScalarType type) {
  return torch::stable::new_empty(beside, shape, type);
}

// Null for a missing tensor; otherwise it must be dense and have this shape and type.
template <class T>
const T* data_of(const OptionalTensor& tensor, std::initializer_list<int64_t> shape) {
  if (!tensor) return nullptr;
  require(tensor->dim() == static_cast<int64_t>(shape.size()) && tensor->is_contiguous());
  int64_t dim = 0;
  for (const int64_t size : shape) require(tensor->size(dim++) == size);
  return tensor->const_data_ptr<T>();
}

// The second to last dimension of a tensor of logits is that of the rows.
cuda::Logits logits_of(const OptionalTensor& logits, const OptionalTensor& token_bitmask = {}) {
  if (!logits) return {};
  require(logits->dim() >= 2 && logits->size(-1) > 0 && logits->size(-1) <= cuda::kMaxVocab);
  require(logits->stride(-1) == 1 || logits->size(-1) == 1);
  cuda::Logits rows = {};
  rows.data = logits->const_data_ptr();
  rows.row_stride = logits->stride(-2);
  rows.num_rows = logits->size(-2);
  rows.size = logits->size(-1);
  rows.element = element(*logits);
  if (token_bitmask) {
    const int64_t words = (rows.size + 31) / 32;
    require(token_bitmask->dim() == 2 && token_bitmask->size(0) == rows.num_rows);
    require(token_bitmask->size(1) == words && (token_bitmask->stride(1) == 1 || words == 1));
    rows.bitmask = token_bitmask->const_data_ptr<int32_t>();
    rows.bitmask_stride = token_bitmask->stride(0);
  }
  return rows;
}

// Draft rows [batch, rows per sequence, draft V].
cuda::Logits draft_of(const OptionalTensor& logits, int64_t batch, int64_t rows, int64_t vocab) {
  if (!logits) return {};
  require(logits->dim() == 3 && logits->size(0) == batch && logits->size(1) == rows);
  require(logits->size(2) <= vocab);
  return logits_of(logits);
}

cuda::SamplingParameters sampling_parameters(int64_t num, const OptionalTensor& temperature,
                                             const OptionalTensor& top_k,
                                             const OptionalTensor& top_p,
                                             const OptionalTensor& min_p) {
  return {data_of<float>(temperature, {num}), data_of<int32_t>(top_k, {num}),
          data_of<float>(top_p, {num}), data_of<float>(min_p, {num})};
}

Tensor uniform(const Tensor& seed, const Tensor& position, int64_t num, int64_t stream) {
  require(seed.dim() == 1 && num >= 0 && stream >= 0 && stream <= UINT32_MAX);
  require_device_of(seed, {position});
  const DeviceGuard guard(seed.get_device_index());
  Tensor out = new_tensor(seed, {seed.size(0), num}, ScalarType::Float);
  check_launch("uniform",
               cuda::launch_uniform(data_of<int64_t>(seed, {seed.size(0)}),
                                    data_of<int64_t>(position, {seed.size(0)}),
                                    out.mutable_data_ptr<float>(), seed.size(0), num,
                                    static_cast<uint32_t>(stream), current_stream(seed)));
  return out;
}

void penalize(Tensor logits, const Tensor& row_sequence, const Tensor& row_node,
              const Tensor& tree_token_ids, const Tensor& cu_history, const Tensor& history_ids,
              const Tensor& history_counts, const Tensor& cu_bias, const Tensor& bias_ids,
              const Tensor& bias, const Tensor& bias_until, const OptionalTensor& parents,
              const OptionalTensor& repetition_penalty, const OptionalTensor& presence_penalty,
              const OptionalTensor& frequency_penalty) {
  require(logits.dim() == 2 && tree_token_ids.dim() == 2 && tree_token_ids.size(1) > 0);
  require(history_ids.dim() == 1 && bias_ids.dim() == 1);
  require_device_of(logits, {row_sequence, row_node, tree_token_ids, cu_history, history_ids,
                             history_counts, cu_bias, bias_ids, bias, bias_until, parents,
                             repetition_penalty, presence_penalty, frequency_penalty});
  const DeviceGuard guard(logits.get_device_index());
  const cuda::Logits all = logits_of(logits);
  require(all.num_rows < 2 || all.row_stride >= all.size);
  const int64_t batch = tree_token_ids.size(0), num_nodes = tree_token_ids.size(1);
  const int64_t known = history_ids.size(0), biased = bias_ids.size(0);
  cuda::PenalizeCall call = {};
  call.logits = logits.mutable_data_ptr();
  call.row_sequence = data_of<int32_t>(row_sequence, {all.num_rows});
  call.row_node = data_of<int32_t>(row_node, {all.num_rows});
  call.tree_token_ids = data_of<int32_t>(tree_token_ids, {batch, num_nodes});
  call.parents = data_of<int32_t>(parents, {batch, num_nodes});
  call.cu_history = data_of<int32_t>(cu_history, {batch + 1});
  call.history_ids = data_of<int32_t>(history_ids, {known});
  call.history_counts = data_of<int32_t>(history_counts, {known});
  call.cu_bias = data_of<int32_t>(cu_bias, {batch + 1});
  call.bias_ids = data_of<int32_t>(bias_ids, {biased});
  call.bias = data_of<float>(bias, {biased});
  call.bias_until = data_of<int32_t>(bias_until, {biased});
  call.repetition_penalty = data_of<float>(repetition_penalty, {batch});
  call.presence_penalty = data_of<float>(presence_penalty, {batch});
  call.frequency_penalty = data_of<float>(frequency_penalty, {batch});
  call.row_stride = all.row_stride;
  call.num_rows = all.num_rows;
  call.vocab = all.size;
  call.batch = batch;
  call.num_nodes = num_nodes;
  call.element = all.element;
  check_launch("penalize", cuda::launch_penalize(call, current_stream(logits)));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> verify_tree(
    const Tensor& target_logits, const Tensor& cu_rows, const Tensor& tree_token_ids,
    const Tensor& parents, const Tensor& uniform_samples, const Text& sibling_rule,
    const OptionalTensor& draft_logits, const OptionalTensor& temperature,
    const OptionalTensor& top_k, const OptionalTensor& top_p, const OptionalTensor& min_p,
    const OptionalTensor& draft_token_map, const OptionalTensor& token_bitmask) {
  const DeviceGuard guard(target_logits.get_device_index());
  require_device_of(target_logits,
                    {cu_rows, tree_token_ids, parents, uniform_samples, draft_logits, temperature,
                     top_k, top_p, min_p, draft_token_map, token_bitmask});
  require(tree_token_ids.dim() == 2 && target_logits.dim() == 2 && tree_token_ids.size(1) > 0);
  const int64_t batch = tree_token_ids.size(0), num_nodes = tree_token_ids.size(1);
  const int64_t vocab = target_logits.size(1);
  Tensor path = new_tensor(target_logits, {batch, num_nodes}, ScalarType::Int);
  Tensor output_token_ids = new_tensor(target_logits, {batch, num_nodes}, ScalarType::Int);
  Tensor accepted_len = new_tensor(target_logits, {batch}, ScalarType::Int);
  Tensor logprobs = new_tensor(target_logits, {batch, num_nodes}, ScalarType::Float);

  cuda::VerifyTreeCall call = {};
  call.rule = sibling_rule_named<cuda::SiblingRule>(sibling_rule);
  require(draft_logits.has_value() == (call.rule != cuda::SiblingRule::kTargetOnly));
  require(draft_logits || !draft_token_map);
  call.target = logits_of(target_logits, token_bitmask);
  call.draft = draft_of(draft_logits, batch, num_nodes, vocab);
  call.draft_batch_stride = draft_logits ? draft_logits->stride(0) : 0;
  call.draft_token_map = data_of<int32_t>(draft_token_map, {vocab});
  call.cu_rows = data_of<int32_t>(cu_rows, {batch + 1});
  call.tree_token_ids = data_of<int32_t>(tree_token_ids, {batch, num_nodes});
  call.parents = data_of<int32_t>(parents, {batch, num_nodes});
  call.uniform_samples = data_of<float>(uniform_samples, {batch, num_nodes + 1});
  call.parameters = sampling_parameters(batch, temperature, top_k, top_p, min_p);
  call.batch = batch;
  call.num_nodes = num_nodes;
  call.path = path.mutable_data_ptr<int32_t>();
  call.output_token_ids = output_token_ids.mutable_data_ptr<int32_t>();
  call.accepted_len = accepted_len.mutable_data_ptr<int32_t>();
  call.logprobs = logprobs.mutable_data_ptr<float>();

  const cuda::RowShape shape =
      cuda::larger_of(cuda::shape_of(call.target), cuda::shape_of(call.draft));
  const cuda::Plan plan = cuda::choose_plan(shape, batch, limits_of(target_logits));
  check_launch("verify_tree", cuda::launch_verify_tree(call, plan, current_stream(target_logits)));
  return {path, output_token_ids, accepted_len, logprobs};
}

std::tuple<Tensor, Tensor> build_tree(const Tensor& parents) {
  const DeviceGuard guard(parents.get_device_index());
  require(parents.dim() == 2);
  const int64_t batch = parents.size(0), num_nodes = parents.size(1);
  Tensor depths = new_tensor(parents, {batch, num_nodes}, ScalarType::Int);
  Tensor mask = new_tensor(parents, {batch, num_nodes, (num_nodes + 63) / 64}, ScalarType::Long);
  const cuda::BuildTreeCall call = {data_of<int32_t>(parents, {batch, num_nodes}), batch, num_nodes,
                                    depths.mutable_data_ptr<int32_t>(),
                                    mask.mutable_data_ptr<int64_t>()};
  check_launch("build_tree", cuda::launch_build_tree(call, current_stream(parents)));
  return {depths, mask};
}

}  // namespace
}  // namespace fastspec

STABLE_TORCH_LIBRARY_IMPL(fastspec, CUDA, m) {
  m.impl("uniform", TORCH_BOX(&fastspec::uniform));
  m.impl("penalize", TORCH_BOX(&fastspec::penalize));
  m.impl("verify_tree", TORCH_BOX(&fastspec::verify_tree));
  m.impl("build_tree", TORCH_BOX(&fastspec::build_tree));
}

STABLE_TORCH_LIBRARY_IMPL(fastspec, CompositeExplicitAutograd, m) {
  m.impl("has_cuda_image", TORCH_BOX(&fastspec::has_cuda_image));
  m.impl("cuda_architectures", TORCH_BOX(&fastspec::cuda_architectures));
}

// Importing the module runs the registrations above; it has no Python names of its own.
PyMODINIT_FUNC PyInit__cuda(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cuda", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}
