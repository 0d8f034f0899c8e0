#include "kernels/reduce.h"

#include <algorithm>
#include <type_traits>

#include "device/launch.h"
#include "kernels/cuda/arrays.h"

namespace pycomm::cuda {
namespace {

constexpr int kPackets = 2;  // that a thread works on at once
constexpr int kScalars = 4;  // the same for arrays that never meet a packet's border together

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

// What an operation does to two numbers. Sums are most of the work, and have kernels of their own. The others are
// chosen for each pair of numbers: memory limits them in any case, and a kernel for each would take three times as long
// to compile.
struct AddOp {  // integers come as unsigned ones: the bytes of the sum are the same
    template <class Sum>
    PYCOMM_MEMBER static Sum combine(ReduceOp, Sum a, Sum b) {
        return static_cast<Sum>(a + b);
    }
};
struct OtherOp {
    template <class Sum>
    PYCOMM_MEMBER static Sum combine(ReduceOp op, Sum a, Sum b) {
        if (op == ReduceOp::kMin) return a != a || a < b ? a : b;
        if (op == ReduceOp::kMax) return a != a || a > b ? a : b;
        if constexpr (std::is_integral_v<Sum>) {
            using Unsigned = std::make_unsigned_t<Sum>;
            return static_cast<Sum>(static_cast<Unsigned>(static_cast<Unsigned>(a) * static_cast<Unsigned>(b)));
        } else {
            return a * b;
        }
    }
};
struct BitOp {
    template <class Sum>
    PYCOMM_MEMBER static Sum combine(ReduceOp op, Sum a, Sum b) {
        return static_cast<Sum>(op == ReduceOp::kAnd ? a & b : op == ReduceOp::kOr ? a | b : a ^ b);
    }
};

struct Reducing {
    Arrays inputs;
    char* out;
    int64_t head;  // elements before the packets
    int64_t count;
    ReduceOp op;
    bool aligned;  // all arrays, to their elements

    template <class Sum>
    PYCOMM_MEMBER Sum finish(Sum sum) const {
        if constexpr (!std::is_integral_v<Sum>) {
            if (op == ReduceOp::kMean) return sum * (Sum(1) / static_cast<Sum>(inputs.count));
        }
        return sum;
    }
};

// Results of the packets that a thread works on at once.
template <class Op, class T, int kCount, int kPackets>
struct Partial {
    static constexpr int kInputs = 4;
    using Loaded = Packet<T, kCount>;

    int64_t places[kPackets];
    typename SumOf<T>::Type values[kPackets][kCount];

    // Combines up to kInputs inputs from number p on; kFirst: they are the first ones. All loads come before that, so
    // that they are under way together; beyond the last input, that one is loaded again.
    template <bool kFirst>
    PYCOMM_MEMBER void take(const Reducing& job, int64_t begin, int p) {
        const int left = job.inputs.count - p;
        const Loaded* from[kInputs];
#pragma unroll
        for (int q = 0; q < kInputs; ++q) {
            const char* array = job.inputs[p + (q < left ? q : left - 1)];
            from[q] = reinterpret_cast<const Loaded*>(array + begin * static_cast<int64_t>(sizeof(T)));
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
                    auto x = SumOf<T>::from(in[q][u].values[e]);
                    if (kFirst && q == 0) {
                        values[u][e] = x;
                    } else if (q < left) {
                        values[u][e] = Op::combine(job.op, values[u][e], x);
                    }
                }
            }
        }
    }
};

// Elements [begin, begin + kCount * packets).
template <class Op, class T, int kCount, int kPackets>
PYCOMM_DEVICE void reduce_packets(const Reducing& job, int64_t begin, int64_t packets) {
    using Part = Partial<Op, T, kCount, kPackets>;
    const int threads = device::num_threads();
    const int64_t per_block = static_cast<int64_t>(threads) * kPackets;
    auto to = reinterpret_cast<Packet<T, kCount>*>(job.out + begin * static_cast<int64_t>(sizeof(T)));
    int64_t first = device::block_index() * per_block + device::thread_index();
    for (; first < packets; first += device::num_blocks() * per_block) {
        Part sums = {};
#pragma unroll
        for (int u = 0; u < kPackets; ++u) {  // past the end the first is computed again
            sums.places[u] = first + u * threads < packets ? first + u * threads : first;
        }
        sums.template take<true>(job, begin, 0);
#pragma unroll 1
        for (int p = Part::kInputs; p < job.inputs.count; p += Part::kInputs) sums.template take<false>(job, begin, p);
#pragma unroll
        for (int u = 0; u < kPackets; ++u) {
            Packet<T, kCount> result;
#pragma unroll
            for (int e = 0; e < kCount; ++e) result.values[e] = SumOf<T>::to(job.finish(sums.values[u][e]));
            to[sums.places[u]] = result;
        }
    }
}

// One by one, for arrays that are not aligned to their elements.
template <class Op, class T>
PYCOMM_DEVICE void reduce_elements(const Reducing& job) {
    auto i = static_cast<int64_t>(device::block_index()) * device::num_threads() + device::thread_index();
    for (; i < job.count; i += static_cast<int64_t>(device::num_blocks()) * device::num_threads()) {
        auto sum = SumOf<T>::from(load_element<T>(job.inputs[0], i));
        for (int p = 1; p < job.inputs.count; ++p) {
            sum = Op::combine(job.op, sum, SumOf<T>::from(load_element<T>(job.inputs[p], i)));
        }
        store_element(job.out, i, SumOf<T>::to(job.finish(sum)));
    }
}

template <class Op, class T>
PYCOMM_KERNEL reduce_kernel(Reducing job) {
    constexpr int kCount = 16 / sizeof(T);
    // Each product of bytes takes a register of its own while the packets of all inputs are held.
    constexpr int kAtOnce = std::is_same_v<Op, OtherOp> && sizeof(T) == 1 ? 1 : kPackets;
    if (!job.aligned) return reduce_elements<Op, T>(job);
    const int64_t packets = (job.count - job.head) / kCount, rest = job.head + packets * kCount;
    reduce_packets<Op, T, kCount, kAtOnce>(job, job.head, packets);
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {  // before the packets, and behind them
        reduce_packets<Op, T, 1, kScalars>(job, side == 0 ? 0 : rest, side == 0 ? job.head : job.count - rest);
    }
}

template <class Op, class T>
void launch_reduce(const Arrays& inputs, const std::vector<Buffer>& buffers, const Buffer& out, ReduceOp op,
                   Stream stream) {
    constexpr int kCount = 16 / sizeof(T);
    const int64_t count = out.num_bytes() / static_cast<int64_t>(sizeof(T));
    int64_t head = -1;
    bool misfit = false, aligned = true;
    auto look_at = [&](const Buffer& array) {
        align<T, kCount>(array.data, head, misfit);
        aligned = aligned && reinterpret_cast<uintptr_t>(array.data) % sizeof(T) == 0;
    };
    look_at(out);
    for (const Buffer& input : buffers) look_at(input);
    if (misfit || head > count) head = count;
    int64_t per_thread = misfit ? kScalars : kPackets * kCount;
    int64_t blocks = blocks_for(count, device::threads_per_block() * per_thread);
    device::launch<reduce_kernel<Op, T>>("reduce", blocks, stream,
                                         Reducing{inputs, out.bytes(), head, count, op, aligned});
}

// Whether arrays of any type can be taken as arrays of uint32_t.
bool are_words(const std::vector<Buffer>& inputs, const Buffer& out) {
    auto is_whole = [](const Buffer& array) { return reinterpret_cast<uintptr_t>(array.data) % 4 == 0; };
    return out.num_bytes() % 4 == 0 && is_whole(out) && std::all_of(inputs.begin(), inputs.end(), is_whole);
}

}  // namespace

int64_t reduce_workspace_bytes(std::size_t num_inputs) { return arrays_bytes(num_inputs); }

void reduce(const Buffer& out, const std::vector<Buffer>& inputs, ReduceOp op, Workspace& workspace, Stream stream) {
    if (out.count == 0) return;
    Arrays arrays = arrays_of(inputs, workspace, stream);
    auto with = [&](auto op_class, auto t) {
        launch_reduce<decltype(op_class), decltype(t)>(arrays, inputs, out, op, stream);
    };
    if (is_bitwise(op)) return are_words(inputs, out) ? with(BitOp{}, uint32_t{}) : with(BitOp{}, uint8_t{});
    const bool sums = op == ReduceOp::kSum || op == ReduceOp::kMean;
    switch (out.dtype) {
        case DType::kF32:
            return sums ? with(AddOp{}, float{}) : with(OtherOp{}, float{});
        case DType::kF16:
            return sums ? with(AddOp{}, F16{}) : with(OtherOp{}, F16{});
        case DType::kBF16:
            return sums ? with(AddOp{}, BF16{}) : with(OtherOp{}, BF16{});
        case DType::kF64:
            return sums ? with(AddOp{}, double{}) : with(OtherOp{}, double{});
        case DType::kI8:
            return sums ? with(AddOp{}, uint8_t{}) : with(OtherOp{}, int8_t{});
        case DType::kU8:
            return sums ? with(AddOp{}, uint8_t{}) : with(OtherOp{}, uint8_t{});
        case DType::kI32:
            return sums ? with(AddOp{}, uint32_t{}) : with(OtherOp{}, int32_t{});
        case DType::kI64:
            return sums ? with(AddOp{}, uint64_t{}) : with(OtherOp{}, int64_t{});
    }
}

}  // namespace pycomm::cuda
