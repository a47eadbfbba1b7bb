"""Kernels that begin before the launch before them has ended (CUDA: programmatic dependent launch).

The one place that launches kernels passes PDL where the GPU can do this.
"""

import triton
import triton.language as tl


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait for what the launch before this one wrote, and let the next one begin.

    Before this, a kernel may read only what no kernel writes, and must not write. Every program
    has to pass here, also one without work: the next launch takes it to mean that all earlier ones
    have ended. The next one may begin before this one has waited, so a kernel of somebody else that
    is launched like this must not read anything of the last two launches before its own wait.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
