#include "kernels/reduce.h"

#include <type_traits>

#include "device/launch.h"
#include "kernels/cuda/arrays.h"

namespace pycomm::cuda {
namespace {

constexpr int kPackets = 2;  // that a thread works on at once
constexpr int kScalars = 4;  // the same where arrays do not lie so that packets can move

// Type of a sum of Ts: integers wrap around, which only unsigned ones may.
template <class T, class = void>
struct SumOf {
    using Type = Wide<T>;
    PYCOMM_MEMBER static Type from(T x) { return widen(x); }
    PYCOMM_MEMBER static T to(Type x) { return narrow<T>(x); }
};
template <class T>
struct SumOf<T, std::enable_if_t<std::is_integral_v<T>>> {
    using Type = T;
    PYCOMM_MEMBER static Type from(T x) { return x; }
    PYCOMM_MEMBER static T to(Type x) { return x; }
};

template <ReduceOp kOp, class Sum>
PYCOMM_DEVICE Sum combine(Sum a, Sum b) {
    if constexpr (kOp == ReduceOp::kMin) {
        return a != a || a < b ? a : b;
    } else if constexpr (kOp == ReduceOp::kMax) {
        return a != a || a > b ? a : b;
    } else if constexpr (std::is_integral_v<Sum>) {
        using Unsigned = std::make_unsigned_t<Sum>;
        auto x = static_cast<Unsigned>(a), y = static_cast<Unsigned>(b);
        if constexpr (kOp == ReduceOp::kProduct) {
            return static_cast<Sum>(static_cast<Unsigned>(x * y));
        } else if constexpr (kOp == ReduceOp::kAnd) {
            return static_cast<Sum>(x & y);
        } else if constexpr (kOp == ReduceOp::kOr) {
            return static_cast<Sum>(x | y);
        } else if constexpr (kOp == ReduceOp::kXor) {
            return static_cast<Sum>(x ^ y);
        } else {
            return static_cast<Sum>(static_cast<Unsigned>(x + y));
        }
    } else if constexpr (kOp == ReduceOp::kProduct) {
        return a * b;
    } else {
        return a + b;
    }
}

template <ReduceOp kOp, class Sum>
PYCOMM_DEVICE Sum finish(Sum sum, int num_inputs) {
    if constexpr (kOp == ReduceOp::kMean && !std::is_integral_v<Sum>) {
        return sum * (Sum(1) / static_cast<Sum>(num_inputs));
    } else {
        return sum;
    }
}

struct Reducing {
    Arrays inputs;
    char* out;
    int64_t head;  // elements before the packets
    int64_t count;
    bool aligned;  // all arrays, to their elements
};

// Sums of the packets that a thread works on at once.
template <class T, int kCount, int kPackets>
struct Partial {
    using Sum = SumOf<T>;
    using Loaded = Packet<T, kCount>;

    int64_t places[kPackets];
    typename Sum::Type values[kPackets][kCount];

    // Takes in kInputs inputs from number p on, the first ones if kFirst. All loads come first, so that they are under
    // way together.
    template <ReduceOp kOp, bool kFirst, int kInputs>
    PYCOMM_MEMBER void take(const Reducing& job, int64_t begin, int p) {
        const Loaded* from[kInputs];
#pragma unroll
        for (int q = 0; q < kInputs; ++q) {
            from[q] = reinterpret_cast<const Loaded*>(job.inputs[p + q] + begin * static_cast<int64_t>(sizeof(T)));
        }
        Loaded in[kInputs][kPackets];
#pragma unroll
        for (int q = 0; q < kInputs; ++q) {
#pragma unroll
            for (int u = 0; u < kPackets; ++u) in[q][u] = from[q][places[u]];
        }
#pragma unroll
        for (int q = 0; q < kInputs; ++q) {
#pragma unroll
            for (int u = 0; u < kPackets; ++u) {
#pragma unroll
                for (int e = 0; e < kCount; ++e) {
                    auto x = Sum::from(in[q][u].values[e]);
                    values[u][e] = kFirst && q == 0 ? x : combine<kOp>(values[u][e], x);
                }
            }
        }
    }
};

// Elements [begin, begin + kCount * packets).
template <ReduceOp kOp, class T, int kCount, int kPackets>
PYCOMM_DEVICE void reduce_packets(const Reducing& job, int64_t begin, int64_t packets) {
    const int threads = device::num_threads(), num_inputs = job.inputs.count;
    const int64_t per_block = static_cast<int64_t>(threads) * kPackets;
    auto to = reinterpret_cast<Packet<T, kCount>*>(job.out + begin * static_cast<int64_t>(sizeof(T)));
    int64_t first = device::block_index() * per_block + device::thread_index();
    for (; first < packets; first += device::num_blocks() * per_block) {
        Partial<T, kCount, kPackets> sums = {};
#pragma unroll
        for (int u = 0; u < kPackets; ++u) {  // where nothing is left the first is worked on again
            sums.places[u] = first + u * threads < packets ? first + u * threads : first;
        }
        int p = (num_inputs - 1) % 4 + 1;
        if (p == 1) {
            sums.template take<kOp, true, 1>(job, begin, 0);
        } else if (p == 2) {
            sums.template take<kOp, true, 2>(job, begin, 0);
        } else if (p == 3) {
            sums.template take<kOp, true, 3>(job, begin, 0);
        } else {
            sums.template take<kOp, true, 4>(job, begin, 0);
        }
        for (; p < num_inputs; p += 4) sums.template take<kOp, false, 4>(job, begin, p);
#pragma unroll
        for (int u = 0; u < kPackets; ++u) {
            Packet<T, kCount> result;
#pragma unroll
            for (int e = 0; e < kCount; ++e) {
                result.values[e] = SumOf<T>::to(finish<kOp>(sums.values[u][e], num_inputs));
            }
            to[sums.places[u]] = result;
        }
    }
}

// One by one, for arrays that are not aligned to their elements.
template <ReduceOp kOp, class T>
PYCOMM_DEVICE void reduce_elements(const Reducing& job) {
    auto i = static_cast<int64_t>(device::block_index()) * device::num_threads() + device::thread_index();
    for (; i < job.count; i += static_cast<int64_t>(device::num_blocks()) * device::num_threads()) {
        auto sum = SumOf<T>::from(load_element<T>(job.inputs[0], i));
        for (int p = 1; p < job.inputs.count; ++p) {
            sum = combine<kOp>(sum, SumOf<T>::from(load_element<T>(job.inputs[p], i)));
        }
        store_element(job.out, i, SumOf<T>::to(finish<kOp>(sum, job.inputs.count)));
    }
}

template <ReduceOp kOp, class T>
PYCOMM_KERNEL reduce_kernel(Reducing job) {
    constexpr int kCount = 16 / sizeof(T);
    // Each product of bytes takes a register of its own while the packets of all inputs are held.
    constexpr int kAtOnce = kOp == ReduceOp::kProduct && sizeof(T) == 1 ? 1 : kPackets;
    if (!job.aligned) return reduce_elements<kOp, T>(job);
    int64_t packets = (job.count - job.head) / kCount, rest = job.head + packets * kCount;
    reduce_packets<kOp, T, 1, kScalars>(job, 0, job.head);
    reduce_packets<kOp, T, kCount, kAtOnce>(job, job.head, packets);
    reduce_packets<kOp, T, 1, 1>(job, rest, job.count - rest);
}

template <class T>
void launch_reduce(const Arrays& inputs, const std::vector<Buffer>& buffers, const Buffer& out, ReduceOp op,
                   Stream stream) {
    constexpr int kCount = 16 / sizeof(T);
    int64_t head = -1;
    bool misfit = false, aligned = true;
    auto look_at = [&](const Buffer& array) {
        align<T, kCount>(array.data, head, misfit);
        aligned = aligned && reinterpret_cast<uintptr_t>(array.data) % sizeof(T) == 0;
    };
    look_at(out);
    for (const Buffer& input : buffers) look_at(input);
    if (misfit || head > out.count) head = out.count;
    Reducing job{inputs, out.bytes(), head, out.count, aligned};
    int64_t per_thread = misfit ? kScalars : kPackets * kCount;
    int64_t blocks = blocks_for(out.count, device::threads_per_block() * per_thread);
    auto with = [&](auto kernel) { device::launch("reduce", kernel, blocks, stream, job); };
    switch (op) {
        case ReduceOp::kSum:
            return with(reduce_kernel<ReduceOp::kSum, T>);
        case ReduceOp::kMean:
            return with(reduce_kernel<ReduceOp::kMean, T>);
        case ReduceOp::kMin:
            return with(reduce_kernel<ReduceOp::kMin, T>);
        case ReduceOp::kMax:
            return with(reduce_kernel<ReduceOp::kMax, T>);
        case ReduceOp::kProduct:
            return with(reduce_kernel<ReduceOp::kProduct, T>);
        default:
            break;
    }
    if constexpr (std::is_integral_v<T>) {
        if (op == ReduceOp::kAnd) return with(reduce_kernel<ReduceOp::kAnd, T>);
        if (op == ReduceOp::kOr) return with(reduce_kernel<ReduceOp::kOr, T>);
        return with(reduce_kernel<ReduceOp::kXor, T>);
    }
}

}  // namespace

int64_t reduce_workspace_bytes(std::size_t num_inputs) { return arrays_bytes(num_inputs); }

void reduce(const Buffer& out, const std::vector<Buffer>& inputs, ReduceOp op, Workspace& workspace, Stream stream) {
    if (out.count == 0) return;
    Arrays arrays = arrays_of(inputs, workspace, stream);
    switch (out.dtype) {
        case DType::kF32:
            return launch_reduce<float>(arrays, inputs, out, op, stream);
        case DType::kF16:
            return launch_reduce<F16>(arrays, inputs, out, op, stream);
        case DType::kBF16:
            return launch_reduce<BF16>(arrays, inputs, out, op, stream);
        case DType::kF64:
            return launch_reduce<double>(arrays, inputs, out, op, stream);
        case DType::kI8:
            return launch_reduce<int8_t>(arrays, inputs, out, op, stream);
        case DType::kU8:
            return launch_reduce<uint8_t>(arrays, inputs, out, op, stream);
        case DType::kI32:
            return launch_reduce<int32_t>(arrays, inputs, out, op, stream);
        case DType::kI64:
            return launch_reduce<int64_t>(arrays, inputs, out, op, stream);
    }
}

}  // namespace pycomm::cuda
