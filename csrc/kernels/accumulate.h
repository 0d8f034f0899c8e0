// accumulate: a bucket of gradients into what is kept of earlier ones, in one pass.
//
//   g[i] = grads[j][i] * (scale * factors[j])  (+ weights[j][i] * decay)
//   acc[i] = residual[i] + g[i]                                                       error feedback
//   velocity[i] = momentum * old_velocity[i] + g[i],  acc[i] = residual[i] + velocity[i]    with momentum correction
//   velocity[i] = momentum * (old_velocity[i] + g[i]),  acc[i] = (residual[i] + velocity[i]) + g[i]        Nesterov's
//
// acc and the three others are flat, float32, or float64 where the gradients are, and as long as all gradients
// together, which lie in them one after the other. An absent residual stands for zeros. Gradients are of any one
// floating type, weights (for weight decay, with them all or none) of the same. Every product is rounded before the
// sum. acc and velocity may be exactly their old ones; a gradient of acc's type may lie exactly at its place in acc.
// Beyond that, what is written overlaps nothing else of the call.
#pragma once

#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "kernels/on_device.h"

namespace pycomm {

struct Accumulation {
    std::vector<Buffer> grads;
    std::vector<Buffer> weights;     // none, or one for each gradient
    const float* factors = nullptr;  // one for each gradient, where the gradients are; null: all 1
    double decay = 0.0;
    Buffer acc;
    const void* residual = nullptr;
    void* velocity = nullptr;  // null: no momentum correction
    const void* old_velocity = nullptr;
    float momentum = 0.0f;
    bool nesterov = false;
};

// finite[j]: whether everything that gradient j led to is.
void accumulate(const Accumulation& job, double scale, bool* finite, int num_threads);

namespace cuda {

int64_t accumulate_workspace_bytes(const Accumulation& job);
void accumulate(const Accumulation& job, Scale scale, bool* finite, Workspace& workspace, Stream stream);

}  // namespace cuda
}  // namespace pycomm
