#if defined(__x86_64__)
#define FASTSPEC_ISA avx2
#include "rows.inl"
#endif
