#if defined(__x86_64__)
#define FASTSPEC_ISA avx512
#include "kernels.inl"
#endif
