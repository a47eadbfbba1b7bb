#if defined(__x86_64__)
#define FASTSPEC_ISA avx512
#include "rows.inl"
#endif
