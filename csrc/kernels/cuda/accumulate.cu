#include "kernels/accumulate.h"

#include "device/launch.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/host.h"

namespace pycomm::cuda {
namespace {

constexpr int64_t kPerThread = 4;  // packets

template <class Acc, class Grad>
PYCOMM_KERNEL accumulate_kernel(char* acc, const char* residual, const char* grad, int64_t count, Scale scale,
                                bool* finite) {
    constexpr int kCount = 16 / sizeof(Acc);
    Acc factor = factor_of<Acc>(scale);
    bool all = true;
    auto one = [&](Grad g, Acc r) {
        Acc term = static_cast<Acc>(widen(g)) * factor;
        Acc sum = residual == nullptr ? term : r + term;
        all = all && is_finite(sum);
        return sum;
    };
    auto scalar = [&](int64_t i) {
        Acc r = residual == nullptr ? Acc(0) : load_element<Acc>(residual, i);
        store_element(acc, i, one(load_element<Grad>(grad, i), r));
    };
    int64_t head = -1;
    bool misfit = false;
    align<Acc, kCount>(acc, head, misfit);
    if (residual != nullptr) align<Acc, kCount>(residual, head, misfit);
    align<Grad, kCount>(grad, head, misfit);
    if (misfit || head > count) head = count;
    int64_t thread = static_cast<int64_t>(device::block_index()) * device::num_threads() + device::thread_index();
    int64_t stride = static_cast<int64_t>(device::num_blocks()) * device::num_threads();
    for (int64_t i = thread; i < head; i += stride) scalar(i);
    int64_t packets = (count - head) / kCount;
    auto out = reinterpret_cast<Packet<Acc, kCount>*>(acc + head * static_cast<int64_t>(sizeof(Acc)));
    const char* old_bytes = residual == nullptr ? nullptr : residual + head * static_cast<int64_t>(sizeof(Acc));
    auto old = reinterpret_cast<const Packet<Acc, kCount>*>(old_bytes);
    auto from = reinterpret_cast<const Packet<Grad, kCount>*>(grad + head * static_cast<int64_t>(sizeof(Grad)));
    for (int64_t i = thread; i < packets; i += kPerThread * stride) {
        Packet<Acc, kCount> r[kPerThread] = {};
        Packet<Grad, kCount> g[kPerThread] = {};
#pragma unroll
        for (int u = 0; u < kPerThread; ++u) {
            if (i + u * stride >= packets) break;
            g[u] = from[i + u * stride];
            if (residual != nullptr) r[u] = old[i + u * stride];
        }
#pragma unroll
        for (int u = 0; u < kPerThread; ++u) {
            if (i + u * stride >= packets) break;
            Packet<Acc, kCount> sum;
#pragma unroll
            for (int e = 0; e < kCount; ++e) sum.values[e] = one(g[u].values[e], r[u].values[e]);
            out[i + u * stride] = sum;
        }
    }
    for (int64_t i = head + packets * kCount + thread; i < count; i += stride) scalar(i);
    if (finite != nullptr && !all) *finite = false;
}

}  // namespace

void accumulate(const Buffer& acc, const Buffer* residual, const Buffer& grad, Scale scale, bool* finite,
                Stream stream) {
    if (finite != nullptr) device::fill_bytes(finite, 1, 1, stream);
    if (acc.count == 0) return;
    with_float_type(grad.dtype, [&](auto* type) {
        using Grad = std::remove_pointer_t<decltype(type)>;
        using Acc = Wide<Grad>;
        int64_t per_block = device::threads_per_block() * kPerThread * static_cast<int64_t>(16 / sizeof(Acc));
        device::launch("accumulate", accumulate_kernel<Acc, Grad>, blocks_for(acc.count, per_block), stream,
                       acc.bytes(), residual == nullptr ? nullptr : residual->bytes(), grad.bytes(), acc.count, scale,
                       finite);
    });
}

}  // namespace pycomm::cuda
