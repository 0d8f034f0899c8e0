// step: one step of an optimizer for many parameters, every array touched once. Of each element, with
// g = grads[j][i] * scale + decay * w:
//
//   kMomentum   (SGD, without rates; LARS, with lr 1 and the rate inside the momentum)
//               d = (rates[j] * take) * g;  with a state: v = momentum * v + d, and d = v, Nesterov's d + momentum * v
//               w -= lr * d
//   kAdam       (and AdamW)
//               m += (1 - beta1) * (g - m);  v = beta2 * v + (1 - beta2) * g^2;  [u = max(u, v)]
//               w -= fade * w + lr * (m * unbias1) / (sqrt(v or u) * unroot2 + eps)
//   kRmsprop    q = alpha * q + (1 - alpha) * g^2;  [a += (1 - alpha) * (g - a)]
//               d = g / (sqrt(q [- a^2, or 0]) + eps);  [b = momentum * b + d, d = b];  w -= lr * d
//   kLambMoments  Adam's m and v, of g without decay; weights are read only;
//               squares[2j], squares[2j + 1]: sums of the squares of w and of r, where
//               r = (m * unbias1) / (sqrt(v) * unroot2 + eps) + decay * w
//   kLambApply  w -= rates[j] * r, with r as above; grads are not read, states not written
//
// Weights and states are of one type, float32 or float64, in which everything is computed; gradients of any floating
// types. copies[j], where there are copies, gets w rounded to its half type (weights are float32 then). Arrays of
// parameter j have equally many elements, are aligned to them, and do not overlap. squares are added up as norms.h
// says. rules.h has the arithmetic, element by element, which all devices share: CPU and GPU agree to the bit.
#pragma once

#include <vector>

#include "base/buffer.h"
#include "kernels/on_device.h"
#include "kernels/rules.h"

namespace pycomm {

struct Step {
    Rule rule = Rule::kMomentum;
    Coefficients coefficients;
    std::vector<Buffer> weights, grads, copies;  // grads and copies: one for each weight, or none
    std::vector<Buffer> states[kMostStates];     // likewise; states[s] as has[s] in rules.h
    const double* rates = nullptr;               // one for each weight, where the weights are; null: all 1
    double* squares = nullptr;                   // two for each weight, kLambMoments only
};

void step(const Step& job, double scale, int num_threads);

namespace cuda {

int64_t step_workspace_bytes(const Step& job);
void step(const Step& job, Scale scale, Workspace& workspace, Stream stream);

}  // namespace cuda
}  // namespace pycomm
