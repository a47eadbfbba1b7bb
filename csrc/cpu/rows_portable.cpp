#define FASTSPEC_ISA portable
#include "rows.inl"
