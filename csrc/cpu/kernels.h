// The vector kernels, compiled once per instruction set and chosen when the library is loaded.
#pragma once
#include <cstdint>

namespace fastspec::cpu {

struct KernelTable {
  const char* name;
};

// The table for the widest instruction set that this processor has.
const KernelTable& kernels();

}  // namespace fastspec::cpu
