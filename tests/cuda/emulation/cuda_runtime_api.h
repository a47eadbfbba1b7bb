// The part of the CUDA runtime's C surface that csrc/cuda uses, for a compiler without CUDA.
#pragma once
#include <cstddef>

enum cudaError_t { cudaSuccess = 0 };
using cudaStream_t = void*;
