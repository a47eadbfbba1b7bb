// Checks and unpacks the pages of a cache, for the ops that read or write them.
#pragma once
#include "bindings_cpu.h"
#include "cpu/store_kv.h"
#include "cpu/tree_attention.h"

namespace fastspec {

// Without slots and the data to store.
cpu::StoreCall store_call(const Tensor& key_cache, const Tensor& value_cache);

void set_slots(const Tensor& slot_mapping, cpu::StoreCall& call);

// The common part of the attention ops, without queries, options and outputs.
cpu::AttentionCall paged_call(int64_t num_rows, int64_t num_heads, const Tensor& key_cache,
                              const Tensor& value_cache, const Tensor& block_table,
                              const Tensor& context_lens, const Tensor& cu_rows, double scale);

// What a row of a decoder sees, and the bounds of its scores.
void set_options(cpu::AttentionCall& call, int64_t sliding_window, double softcap,
                 const OptionalTensor& sinks, const OptionalTensor& ancestor_mask);

}  // namespace fastspec
