// The vector kernels, compiled once per instruction set and chosen at run time.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "layers.h"
#include "linear.h"
#include "tree_attention.h"

namespace fastspec::cpu {

// Whether the compiler supports the dot products of AVX512-BF16.
#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 10)
#define FASTSPEC_COMPILES_BFLOAT16 1
#else
#define FASTSPEC_COMPILES_BFLOAT16 0
#endif
// And AMX tiles, which the operating system must grant.
#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define FASTSPEC_COMPILES_AMX 1
#else
#define FASTSPEC_COMPILES_AMX 0
#endif

struct KernelTable {
  AttentionKernels attention;
  LinearKernels linear;
  LayerKernels layers;
};

// The instruction sets supported by this build and this processor, the widest last.
std::vector<std::string> instruction_sets();

// The set that all calls use: the widest, unless another one is chosen. Must not change while calls
// run, as a call must see one set. std::invalid_argument unless it is in instruction_sets().
std::string instruction_set();
void use_instruction_set(const std::string& name);

// The kernels of the set in use.
const KernelTable& kernels();
bool multiplies_bfloat16();
bool multiplies_bytes();  // AVX512-VNNI
bool multiplies_tiles();

}  // namespace fastspec::cpu
