// The only file of _cuda that knows torch: it unpacks tensors, allocates and registers the ops.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "cuda/launch.h"

namespace fastspec {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

void check_launch(const char* op, cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess, op, ": ", cudaGetErrorString(error));
}

Tensor uniform(const Tensor& seed, const Tensor& position, int64_t num, int64_t stream) {
  const DeviceGuard guard(seed.get_device_index());
  Tensor out = torch::stable::new_empty(seed, {seed.size(0), num}, ScalarType::Float);
  check_launch("uniform", cuda::launch_uniform(
                              seed.const_data_ptr<int64_t>(), position.const_data_ptr<int64_t>(),
                              out.mutable_data_ptr<float>(), seed.size(0), num,
                              static_cast<uint32_t>(stream), current_stream(seed)));
  return out;
}

}  // namespace
}  // namespace fastspec

STABLE_TORCH_LIBRARY_IMPL(fastspec, CUDA, m) { m.impl("uniform", TORCH_BOX(&fastspec::uniform)); }

// Importing the module runs the registrations above; it has no Python names of its own.
PyMODINIT_FUNC PyInit__cuda(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cuda", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}
