// Shared by the binding files of _cuda, which are its only sources that depend on torch.
#pragma once
#include <torch/csrc/stable/accelerator.h>

#include "bindings.h"
#include "cuda/launch.h"

namespace fastspec {

using torch::stable::accelerator::DeviceGuard;

inline cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline void check_launch(const char* op, cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess, op, ": ", cudaGetErrorString(error));
}

inline void require_device_of(const Tensor& first, std::initializer_list<OptionalTensor> others) {
  for (const OptionalTensor& other : others) require(!other || other->device() == first.device());
}

inline cuda::Element element(const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  if (type == ScalarType::Float) return cuda::Element::kFloat32;
  if (type == ScalarType::BFloat16) return cuda::Element::kBFloat16;
  require(type == ScalarType::Half);
  return cuda::Element::kFloat16;
}

}  // namespace fastspec
