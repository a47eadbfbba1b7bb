#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "kernels.h"
#include "row_kernels.h"

namespace fastspec::cpu {

#define FASTSPEC_DECLARE_TABLES(isa)         \
  namespace isa {                            \
  extern const KernelTable kTable;           \
  extern const SamplingTable kSamplingTable; \
  }
FASTSPEC_DECLARE_TABLES(portable)
#if defined(__x86_64__)
FASTSPEC_DECLARE_TABLES(avx2)
FASTSPEC_DECLARE_TABLES(avx512)
#endif

struct InstructionSet {
  const char* name;
  const KernelTable* kernels;
  const SamplingTable* sampling;
  bool multiplies_bfloat16;
};

static std::vector<InstructionSet> find_instruction_sets() {
  std::vector<InstructionSet> sets = {
      {"portable", &portable::kTable, &portable::kSamplingTable, false}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    sets.push_back({"avx2", &avx2::kTable, &avx2::kSamplingTable, false});
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    sets.push_back({"avx512", &avx512::kTable, &avx512::kSamplingTable, false});
#if FASTSPEC_COMPILES_BFLOAT16
    if (__builtin_cpu_supports("avx512bf16")) {
      sets.push_back({"avx512_bf16", &avx512::kTable, &avx512::kSamplingTable, true});
    }
#endif
  }
#endif
  return sets;
}

static const std::vector<InstructionSet>& found() {
  static const std::vector<InstructionSet> sets = find_instruction_sets();
  return sets;
}

static std::atomic<const InstructionSet*>& in_use() {
  static std::atomic<const InstructionSet*> set{&found().back()};
  return set;
}

static const InstructionSet& current() { return *in_use().load(std::memory_order_relaxed); }

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const InstructionSet& set : found()) names.push_back(set.name);
  return names;
}

std::string instruction_set() { return current().name; }

void use_instruction_set(const std::string& name) {
  const auto set = std::find_if(found().begin(), found().end(),
                                [&](const InstructionSet& each) { return name == each.name; });
  if (set == found().end()) {
    throw std::invalid_argument("this build or this processor has no instruction set " + name);
  }
  in_use().store(&*set, std::memory_order_relaxed);
}

const KernelTable& kernels() { return *current().kernels; }

bool multiplies_bfloat16() { return current().multiplies_bfloat16; }

const SamplingTable& sampling_kernels() { return *current().sampling; }

}  // namespace fastspec::cpu
