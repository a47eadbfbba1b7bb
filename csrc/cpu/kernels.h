// The vector kernels, compiled once per instruction set and chosen at run time.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "layers.h"
#include "linear.h"
#include "tree_attention.h"

namespace fastspec::cpu {

// Whether the compiler knows the dot products of AVX512-BF16.
#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 10)
#define FASTSPEC_COMPILES_BFLOAT16 1
#else
#define FASTSPEC_COMPILES_BFLOAT16 0
#endif
// And its tiles; the operating system has to hand them out.
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

// The instruction sets that this build and this processor have, the widest last.
std::vector<std::string> instruction_sets();

// The set that all calls use: the widest, until another one is chosen. Not to be changed while
// calls run: one call must see one set. std::invalid_argument unless it is in instruction_sets().
std::string instruction_set();
void use_instruction_set(const std::string& name);

// Of the set in use.
const KernelTable& kernels();
bool multiplies_bfloat16();
bool multiplies_tiles();

}  // namespace fastspec::cpu
