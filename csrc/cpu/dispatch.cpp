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

struct Tables {
  const KernelTable& kernels;
  const SamplingTable& sampling;
};

static Tables choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return {avx512::kTable, avx512::kSamplingTable};
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    return {avx2::kTable, avx2::kSamplingTable};
  }
#endif
  return {portable::kTable, portable::kSamplingTable};
}

static const Tables& tables() {
  static const Tables chosen = choose();
  return chosen;
}

const KernelTable& kernels() { return tables().kernels; }

const SamplingTable& sampling_kernels() { return tables().sampling; }

}  // namespace fastspec::cpu
