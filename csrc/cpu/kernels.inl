// Every vector kernel, in namespace FASTSPEC_ISA; included by one source file per instruction set.
#include "kernels.h"
#include "layers.inl"
#include "linear.inl"
#include "tree_attention.inl"

namespace fastspec::cpu::FASTSPEC_ISA {

#define FASTSPEC_STRINGIFY(x) #x
#define FASTSPEC_NAME(x) FASTSPEC_STRINGIFY(x)
extern const KernelTable kTable;
const KernelTable kTable = {FASTSPEC_NAME(FASTSPEC_ISA), kAttention, kLinear, kLayers};

}  // namespace fastspec::cpu::FASTSPEC_ISA
