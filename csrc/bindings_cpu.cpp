// The only file of _cpu that knows torch: it unpacks tensors, allocates outputs and registers the ops.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "common/philox.h"
#include "cpu/kernels.h"

namespace fastspec {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor uniform(const Tensor& seed, const Tensor& position, int64_t num, int64_t stream) {
  const int64_t batch = seed.size(0);
  Tensor out = torch::stable::new_empty(seed, {batch, num}, ScalarType::Float);
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

std::string instruction_set() { return cpu::kernels().name; }

}  // namespace
}  // namespace fastspec

STABLE_TORCH_LIBRARY_IMPL(fastspec, CPU, m) { m.impl("uniform", TORCH_BOX(&fastspec::uniform)); }

STABLE_TORCH_LIBRARY_IMPL(fastspec, CompositeExplicitAutograd, m) {
  m.impl("cpu_instruction_set", TORCH_BOX(&fastspec::instruction_set));
}

// Importing the module runs the registrations above; it has no Python names of its own.
PyMODINIT_FUNC PyInit__cpu(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cpu", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}
