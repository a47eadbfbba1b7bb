// Shared by the binding files of _cpu, which are its only sources that depend on torch.
#pragma once

#include <vector>

#include "bindings.h"
#include "cpu/linear.h"
#include "cpu/sampling.h"

namespace fastspec {

inline int32_t dtype_code(ScalarType type) {
  switch (type) {
    case ScalarType::Int:
      return aoti_torch_dtype_int32();
    case ScalarType::Long:
      return aoti_torch_dtype_int64();
    case ScalarType::BFloat16:
      return aoti_torch_dtype_bfloat16();
    case ScalarType::Half:
      return aoti_torch_dtype_float16();
    default:
      return aoti_torch_dtype_float32();
  }
}

// An uninitialised dense tensor, bypassing torch's dispatcher.
inline Tensor new_tensor(const std::vector<int64_t>& shape, ScalarType type) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t dim = shape.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * shape[dim];
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(),
                                                  strides.data(), dtype_code(type),
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

inline bool is_vector(const Tensor& tensor, int64_t size, ScalarType type) {
  return has_shape(tensor, {size}) && tensor.scalar_type() == type && tensor.is_contiguous();
}

inline bool is_matrix(const Tensor& tensor, ScalarType type) {
  return tensor.dim() == 2 && tensor.scalar_type() == type &&
         (tensor.stride(1) == 1 || tensor.size(1) <= 1);
}

template <class T>
const T* data_or_null(const OptionalTensor& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

// One value per row or per sequence.
inline cpu::SamplingParameters sampling_parameters(int64_t num, const OptionalTensor& temperature,
                                                   const OptionalTensor& top_k,
                                                   const OptionalTensor& top_p,
                                                   const OptionalTensor& min_p) {
  require(!temperature || is_vector(*temperature, num, ScalarType::Float));
  require(!top_k || is_vector(*top_k, num, ScalarType::Int));
  require(!top_p || is_vector(*top_p, num, ScalarType::Float));
  require(!min_p || is_vector(*min_p, num, ScalarType::Float));
  return {data_or_null<float>(temperature), data_or_null<int32_t>(top_k),
          data_or_null<float>(top_p), data_or_null<float>(min_p)};
}

inline cpu::Element element(const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  if (type == ScalarType::Float) return cpu::Element::kFloat32;
  if (type == ScalarType::BFloat16) return cpu::Element::kBFloat16;
  require(type == ScalarType::Half);
  return cpu::Element::kFloat16;
}

// Whether these are the blocks of 4- or 8-bit weights of `num_outputs` outputs and `depth` inputs.
inline bool is_quantized_weight(const Tensor& weight, int64_t num_outputs, int64_t depth) {
  if (weight.scalar_type() != ScalarType::Byte || weight.dim() != 3) return false;
  const int64_t bytes = weight.size(2);
  return weight.is_contiguous() && weight.size(0) == cpu::output_tiles(num_outputs) &&
         weight.size(1) == cpu::depth_blocks(depth) &&
         (bytes == cpu::block_bytes(cpu::Element::kInt4) ||
          bytes == cpu::block_bytes(cpu::Element::kInt8));
}

// Returns the element type of a quantized weight, kInt4 or kInt8.
inline cpu::Element bits_of(const Tensor& weight) {
  return weight.size(2) == cpu::block_bytes(cpu::Element::kInt4) ? cpu::Element::kInt4
                                                                 : cpu::Element::kInt8;
}

}  // namespace fastspec
