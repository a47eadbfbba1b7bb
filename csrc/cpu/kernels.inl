// Every vector kernel, in namespace FASTSPEC_ISA; included by one source file per instruction set.
#include "kernels.h"
#include "layers.inl"
#include "linear.inl"
#include "tree_attention.inl"

namespace fastspec::cpu::FASTSPEC_ISA {

extern const KernelTable kTable;
const KernelTable kTable = {kAttention, kLinear, kLayers};

}  // namespace fastspec::cpu::FASTSPEC_ISA
