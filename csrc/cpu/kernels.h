// The vector kernels, compiled once per instruction set and chosen when the library is loaded.
#pragma once
#include <cstdint>

#include "layers.h"
#include "linear.h"
#include "tree_attention.h"

namespace fastspec::cpu {

struct KernelTable {
  const char* name;
  AttentionKernels attention;
  LinearKernels linear;
  LayerKernels layers;
};

// The table for the widest instruction set that this processor has.
const KernelTable& kernels();

}  // namespace fastspec::cpu
