// What the binding files of _cuda share; with them the only sources of _cuda that know torch.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>

#include "bindings_text.h"
#include "cuda/launch.h"

namespace fastspec {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;
using OptionalTensor = std::optional<Tensor>;

inline cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline void check_launch(const char* op, cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess, op, ": ", cudaGetErrorString(error));
}

// The public ops find out which argument is wrong; here it only must not get through.
inline void require(bool fits) {
  if (!fits) throw std::invalid_argument("the arguments do not fit together");
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
