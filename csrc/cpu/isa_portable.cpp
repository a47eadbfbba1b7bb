#define FASTSPEC_ISA portable
#include "kernels.inl"
