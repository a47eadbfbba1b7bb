// Unpacks the tensors of `uniform` and of the ops on layers, allocates their outputs, and registers
// them.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <string>

#include "bindings_cpu.h"
#include "common/philox.h"
#include "cpu/kernels.h"
#include "cpu/layers.h"
#include "cpu/linear.h"

namespace fastspec {
namespace {

Tensor uniform(const Tensor& seed, const Tensor& position, int64_t num, int64_t stream) {
  require(seed.dim() == 1 && num >= 0 && stream >= 0 && stream < (int64_t{1} << 32));
  const int64_t batch = seed.size(0);
  require(is_vector(seed, batch, ScalarType::Long));
  require(is_vector(position, batch, ScalarType::Long));
  Tensor out = new_tensor({batch, num}, ScalarType::Float);
  const int64_t* seeds = seed.const_data_ptr<int64_t>();
  const int64_t* positions = position.const_data_ptr<int64_t>();
  float* samples = out.mutable_data_ptr<float>();
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = 0; i < num; ++i) {
      samples[b * num + i] = philox_uniform(seeds[b], positions[b], stream, i);
    }
  }
  return out;
}

// The shape of rows in any number of leading dimensions.
std::vector<int64_t> shape_of_rows(const Tensor& rows) {
  require(rows.dim() > 0);
  return {rows.sizes().begin(), rows.sizes().end()};
}

// Runs a product of checked tensors, whose types and numbers of inputs and outputs are filled in.
Tensor multiply(cpu::LinearCall& call, const Tensor& input, const Tensor& weight,
                const OptionalTensor& bias) {
  std::vector<int64_t> shape = shape_of_rows(input);
  shape.back() = call.num_outputs;
  Tensor out = new_tensor(shape, input.scalar_type());
  call.num_rows = call.num_outputs == 0 ? 0 : out.numel() / call.num_outputs;
  call.input = input.const_data_ptr();
  call.weight = weight.const_data_ptr();
  call.bias = bias ? bias->const_data_ptr() : nullptr;
  call.out = out.mutable_data_ptr();
  cpu::linear(call);
  return out;
}

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  require(input.dim() > 0 && weight.dim() == 2);
  cpu::LinearCall call = {};
  call.element = call.weight_element = element(weight);
  call.num_outputs = weight.size(0);
  call.depth = weight.size(1);
  require(input.is_contiguous() && weight.is_contiguous() && (!bias || bias->is_contiguous()));
  require(input.scalar_type() == weight.scalar_type() && input.size(input.dim() - 1) == call.depth);
  require(!bias ||
          (has_shape(*bias, {call.num_outputs}) && bias->scalar_type() == weight.scalar_type()));
  return multiply(call, input, weight, bias);
}

Tensor quantized_linear(const Tensor& input, const Tensor& weight, int64_t num_outputs,
                        const OptionalTensor& bias) {
  require(input.dim() > 0);
  cpu::LinearCall call = {};
  call.element = element(input);
  call.depth = input.size(input.dim() - 1);
  call.num_outputs = num_outputs;
  require(input.is_contiguous() && call.depth > 0 && num_outputs > 0);
  require(is_quantized_weight(weight, num_outputs, call.depth));
  require(!bias || is_vector(*bias, num_outputs, ScalarType::Float));
  call.weight_element = bits_of(weight);
  return multiply(call, input, weight, bias);
}

bool is_like(const Tensor& tensor, std::initializer_list<int64_t> shape, ScalarType type) {
  return has_shape(tensor, shape) && tensor.scalar_type() == type && tensor.is_contiguous();
}

Tensor rms_norm(const Tensor& input, const Tensor& weight, double eps) {
  const std::vector<int64_t> shape = shape_of_rows(input);
  const int64_t size = shape.back();
  const ScalarType type = input.scalar_type();
  require(input.is_contiguous() && size > 0 && is_like(weight, {size}, type) && eps > 0);
  Tensor out = new_tensor(shape, type);
  const cpu::Norm norm = {weight.const_data_ptr(), element(weight), static_cast<float>(eps), 0.0f};
  cpu::rms_norm(input.const_data_ptr(), norm, input.numel() / size, size, out.mutable_data_ptr());
  return out;
}

Tensor gated_mlp(const Tensor& input, const Tensor& gate_weight, const Tensor& up_weight,
                 const Tensor& down_weight) {
  const std::vector<int64_t> shape = shape_of_rows(input);
  require(gate_weight.dim() == 2);
  const int64_t size = shape.back(), hidden = gate_weight.size(0);
  const ScalarType type = input.scalar_type();
  require(input.is_contiguous() && size > 0);
  require(is_like(gate_weight, {hidden, size}, type) && is_like(up_weight, {hidden, size}, type));
  require(is_like(down_weight, {size, hidden}, type));
  Tensor out = new_tensor(shape, type);
  const cpu::Element kind = element(input);
  cpu::gated_mlp({{gate_weight.const_data_ptr(), up_weight.const_data_ptr(),
                   down_weight.const_data_ptr(), size, hidden, kind, cpu::Activation::kSilu},
                  input.const_data_ptr(),
                  kind,
                  out.mutable_data_ptr(),
                  kind,
                  input.numel() / size});
  return out;
}

void use_instruction_set(const Text& name) { cpu::use_instruction_set(name); }

}  // namespace
}  // namespace fastspec

STABLE_TORCH_LIBRARY_IMPL(fastspec, CPU, m) {
  m.impl("uniform", TORCH_BOX(&fastspec::uniform));
  m.impl("rms_norm", TORCH_BOX(&fastspec::rms_norm));
  m.impl("gated_mlp", TORCH_BOX(&fastspec::gated_mlp));
  m.impl("linear", TORCH_BOX(&fastspec::linear));
  m.impl("quantized_linear", TORCH_BOX(&fastspec::quantized_linear));
}

STABLE_TORCH_LIBRARY_IMPL(fastspec, CompositeExplicitAutograd, m) {
  m.impl("cpu_instruction_set", TORCH_BOX(&fastspec::cpu::instruction_set));
  m.impl("cpu_instruction_sets", TORCH_BOX(&fastspec::cpu::instruction_sets));
  m.impl("use_cpu_instruction_set", TORCH_BOX(&fastspec::use_instruction_set));
}

// Importing the module runs the registrations above; it has no Python names of its own.
PyMODINIT_FUNC PyInit__cpu(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cpu", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}
