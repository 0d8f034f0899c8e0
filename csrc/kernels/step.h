// step: one step of an optimizer for many parameters, every array touched once. For each element, with
// g = grads[j][i] * scale + decay * w, and with the coefficients of rules.h:
//
//   kMomentum   (SGD, without rates; LARS, with lr 1 and the rate inside the momentum)
//               d = (rates[j] * (1 - dampening)) * g;
//               with a state: v = momentum * v + d, then d = v, or Nesterov's d + momentum * v;  w -= lr * d
//   kAdam       (and AdamW)
//               m += (1 - beta1) * (g - m);  v = beta2 * v + (1 - beta2) * g^2;  [u = max(u, v)]
//               w -= decoupled_decay * w + lr * m' / (sqrt(v' or u') + eps), where
//               m' = m / (1 - beta1^t), sqrt(v') = sqrt(v) / sqrt(1 - beta2^t), and sqrt(u') likewise
//   kRmsprop    q = alpha * q + (1 - alpha) * g^2;  [a += (1 - alpha) * (g - a)]
//               d = g / (sqrt(q [- a^2, or 0]) + eps);  [b = momentum * b + d, d = b];  w -= lr * d
//   kAdagrad    s += g^2;  w -= lr * g / (sqrt(s) + eps)
//   kLambMoments  Adam's m and v, of g without decay; weights are read only;
//               squares[2j], squares[2j + 1]: sums of the squares of w and of r, where
//               r = m' / (sqrt(v') + eps) + decay * w, with m' and v' as in kAdam
//   kLambApply  w -= rates[j] * r, with r as above; grads are not read, states not written
//
// Both corrections of the bias are products with the inverses that the coefficients hold.
//
// If only the device knows whether the gradients are finite:
//   found      if the number at `found` is not 0, nothing is written except squares, which are then meaningless
//   counts     counts[j]: one float32, the steps taken. kLambApply reads it, all others add 1 to it first; bias is
//              corrected by it, parameter by parameter, in place of the coefficients' inverses. Powers are rounded
//              correctly; the C library's, which callers use for those inverses, sometimes differ in the last bit.
//
// If other processes of the host have copies of the parameters (host only):
//   mirrors    mirrors[m][j] gets what is written to the parameter itself: to copies[j], or weights[j] without copies.
//              Of that type; nobody reads it meanwhile.
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
    std::vector<Buffer> counts;                  // likewise
    std::vector<std::vector<Buffer>> mirrors;    // each likewise
    const float* found = nullptr;                // where the weights are
    const double* rates = nullptr;               // one for each weight, where the weights are; null: all 1
    double* squares = nullptr;                   // two for each weight, kLambMoments only
};

void step(const Step& job, double scale, int num_threads);

namespace cuda {

int64_t step_workspace_bytes(const Step& job);
void step(const Step& job, Scale scale, Workspace& workspace, Stream stream);

}  // namespace cuda
}  // namespace pycomm
