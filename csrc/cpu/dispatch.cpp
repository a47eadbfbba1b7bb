#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "kernels.h"
#include "row_kernels.h"

#if FASTSPEC_COMPILES_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
  bool multiplies_bfloat16 = false, multiplies_tiles = false;
};

#if defined(__x86_64__) && FASTSPEC_COMPILES_BFLOAT16
// Linux grants a process the AMX registers on request.
static bool may_use_tiles() {
#if FASTSPEC_COMPILES_AMX
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  uint32_t a, b, c, d;
  const bool has_tiles =
      __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d >> 22 & 1) != 0 && (d >> 24 & 1) != 0;
  return has_tiles && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

static std::vector<InstructionSet> find_instruction_sets() {
  std::vector<InstructionSet> sets = {{"portable", &portable::kTable, &portable::kSamplingTable}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    sets.push_back({"avx2", &avx2::kTable, &avx2::kSamplingTable});
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    sets.push_back({"avx512", &avx512::kTable, &avx512::kSamplingTable});
#if FASTSPEC_COMPILES_BFLOAT16
    // Processors that multiply bfloat16 multiply bytes as well; a virtual one may lack either.
    if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) {
      sets.push_back({"avx512_bf16", &avx512::kTable, &avx512::kSamplingTable, true});
      if (may_use_tiles()) {
        sets.push_back({"amx", &avx512::kTable, &avx512::kSamplingTable, true, true});
      }
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

// No instruction set of ours has only one of both.
bool multiplies_bytes() { return current().multiplies_bfloat16; }

bool multiplies_tiles() { return current().multiplies_tiles; }

const SamplingTable& sampling_kernels() { return *current().sampling; }

}  // namespace fastspec::cpu
