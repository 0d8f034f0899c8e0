// accumulate: adds a bucket of gradients to the residual and the velocity of earlier ones, in one pass.
//
//   g[i] = grads[j][i] * (scale * factor_j)  (+ weights[j][i] * decay)
//   acc[i] = residual[i] + g[i]                                                       error feedback
//   velocity[i] = momentum * old_velocity[i] + g[i],  acc[i] = residual[i] + velocity[i]    with momentum correction
//   velocity[i] = momentum * (old_velocity[i] + g[i]),  acc[i] = (residual[i] + velocity[i]) + g[i]        Nesterov's
//
// Without `clip`, factor_j is 1. With it, factor_j is min(1, clip / (|scale| * norm_j)) rounded to float; norm_j is the
// Euclidean norm of grads[j], from squares added up as norms.h says.
//
// acc, residual, velocity and old_velocity are flat arrays as long as all gradients together, which lie in them one
// after the other. They are float32, or float64 if the gradients are. An absent residual stands for zeros. All
// gradients are of one floating type, and so are the weights, which are given for all gradients or for none. Every
// product is rounded before the sum. acc may be exactly residual, velocity exactly old_velocity, and a gradient of
// acc's type may lie exactly at its place in acc.
//
// Bound by memory: with momentum correction, 20 bytes for each element of float32 at the speed of a copy that writes
// past the caches, 12 without.
//
// Apart from these exceptions, an output overlaps no other array of the call.
#pragma once

#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "kernels/on_device.h"

namespace pycomm {

struct Accumulation {
    std::vector<Buffer> grads;
    std::vector<Buffer> weights;  // none, or one for each gradient
    double clip = 0.0;            // limit of each gradient's norm, times the scale; 0: none
    double decay = 0.0;
    Buffer acc;
    const void* residual = nullptr;
    void* velocity = nullptr;  // null: no momentum correction
    const void* old_velocity = nullptr;
    float momentum = 0.0f;
    bool nesterov = false;
};

// finite[j]: whether all sums of gradient j are finite.
void accumulate(const Accumulation& job, double scale, bool* finite, int num_threads);

namespace cuda {

int64_t accumulate_workspace_bytes(const Accumulation& job);
void accumulate(const Accumulation& job, Scale scale, bool* finite, Workspace& workspace, Stream stream);

}  // namespace cuda
}  // namespace pycomm
