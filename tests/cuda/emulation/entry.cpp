// What the tests call: each launcher under a given order of the threads.
#include <cstdio>
#include <exception>

#include "cuda/launch.h"
#include "cuda/plan.h"
#include "machine.h"

namespace cuda = fastspec::cuda;

struct Run {
  uint64_t order;
  char message[512];
};

namespace {

template <class Launch>
int guarded(Run* run, const Launch& launch) {
  emulation::set_order(run->order);
  try {
    return launch();
  } catch (const std::exception& error) {
    std::snprintf(run->message, sizeof(run->message), "%s", error.what());
    return -1;
  }
}

}  // namespace

extern "C" int emulated_verify_tree(const cuda::VerifyTreeCall* call, const cuda::Plan* plan,
                                    Run* run) {
  return guarded(run, [&] { return cuda::launch_verify_tree(*call, *plan, nullptr); });
}

// The other launchers take no plan.
#define FASTSPEC_EMULATED(op, Call)                                                   \
  extern "C" int emulated_##op(const cuda::Call* call, const cuda::Plan*, Run* run) { \
    return guarded(run, [&] { return cuda::launch_##op(*call, nullptr); });           \
  }

FASTSPEC_EMULATED(build_tree, BuildTreeCall)
FASTSPEC_EMULATED(penalize, PenalizeCall)
FASTSPEC_EMULATED(store_kv, StoreKvCall)
FASTSPEC_EMULATED(compact_kv, CompactKvCall)

struct UniformCall {
  const int64_t *seed, *position;
  float* samples;
  int64_t batch, num, stream_id;
};

extern "C" int emulated_uniform(const UniformCall* call, const cuda::Plan*, Run* run) {
  return guarded(run, [&] {
    return cuda::launch_uniform(call->seed, call->position, call->samples, call->batch, call->num,
                                static_cast<uint32_t>(call->stream_id), nullptr);
  });
}

extern "C" void emulated_device(int device) { emulation::now.device = device; }

extern "C" bool has_clusters(const cuda::Image* image, int64_t device_major) {
  return cuda::has_clusters(*image, device_major);
}

extern "C" void chosen_plan(const cuda::RowShape* row, int64_t rows, const cuda::Limits* limits,
                            cuda::Plan* plan) {
  *plan = cuda::choose_plan(*row, rows, *limits);
}
