#include "kernels/reduce.h"

#include <type_traits>

#include "device/launch.h"
#include "kernels/cuda/table.h"

namespace pycomm::cuda {
namespace {

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
        return static_cast<Sum>(static_cast<Unsigned>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b)));
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

// The inputs are the arrays of `table`, each `count` long.
template <ReduceOp kOp, class T>
PYCOMM_KERNEL reduce_kernel(Table table, char* out, int64_t count) {
    using Sum = SumOf<T>;
    constexpr int kCount = 16 / sizeof(T);
    [[maybe_unused]] constexpr int kInputsAtOnce = std::is_integral_v<T> ? 1 : 4;  // gradients are no integers
    int64_t head = -1;
    bool misfit = false;
    align<T, kCount>(out, head, misfit);
    for (int p = 0; p < table.count; ++p) align<T, kCount>(table.entries[p].data, head, misfit);
    if (misfit || head > count) head = count;
    int64_t thread = static_cast<int64_t>(device::block_index()) * device::num_threads() + device::thread_index();
    int64_t stride = static_cast<int64_t>(device::num_blocks()) * device::num_threads();
    auto scalar = [&](int64_t i) {
        auto sum = Sum::from(load_element<T>(table.entries[0].data, i));
        for (int p = 1; p < table.count; ++p) {
            sum = combine<kOp>(sum, Sum::from(load_element<T>(table.entries[p].data, i)));
        }
        store_element(out, i, Sum::to(finish<kOp>(sum, table.count)));
    };
    for (int64_t i = thread; i < head; i += stride) scalar(i);
    int64_t packets = (count - head) / kCount;
    int64_t head_bytes = head * static_cast<int64_t>(sizeof(T));
    auto input = [&](int p) { return reinterpret_cast<const Packet<T, kCount>*>(table.entries[p].data + head_bytes); };
    auto to = reinterpret_cast<Packet<T, kCount>*>(out + head_bytes);
    for (int64_t i = thread; i < packets; i += stride) {
        typename Sum::Type sum[kCount];
        Packet<T, kCount> first = input(0)[i];
#pragma unroll
        for (int e = 0; e < kCount; ++e) sum[e] = Sum::from(first.values[e]);
#pragma unroll kInputsAtOnce
        for (int p = 1; p < table.count; ++p) {
            Packet<T, kCount> next = input(p)[i];
#pragma unroll
            for (int e = 0; e < kCount; ++e) sum[e] = combine<kOp>(sum[e], Sum::from(next.values[e]));
        }
        Packet<T, kCount> result;
#pragma unroll
        for (int e = 0; e < kCount; ++e) result.values[e] = Sum::to(finish<kOp>(sum[e], table.count));
        to[i] = result;
    }
    for (int64_t i = head + packets * kCount + thread; i < count; i += stride) scalar(i);
}

template <class T>
void launch_reduce(const Table& table, const Buffer& out, ReduceOp op, Stream stream) {
    int64_t per_block = device::threads_per_block() * static_cast<int64_t>(16 / sizeof(T));
    int64_t blocks = blocks_for(out.count, per_block);
    auto with = [&](auto kernel) { device::launch("reduce", kernel, blocks, stream, table, out.bytes(), out.count); };
    switch (op) {
        case ReduceOp::kSum:
            return with(reduce_kernel<ReduceOp::kSum, T>);
        case ReduceOp::kMean:
            return with(reduce_kernel<ReduceOp::kMean, T>);
        case ReduceOp::kMin:
            return with(reduce_kernel<ReduceOp::kMin, T>);
        case ReduceOp::kMax:
            return with(reduce_kernel<ReduceOp::kMax, T>);
    }
}

}  // namespace

int64_t reduce_workspace_bytes(std::size_t num_inputs) { return table_bytes(num_inputs); }

void reduce(const Buffer& out, const std::vector<Buffer>& inputs, ReduceOp op, Workspace& workspace, Stream stream) {
    if (out.count == 0) return;
    Table table = upload(inputs, workspace, stream);
    switch (out.dtype) {
        case DType::kF32:
            return launch_reduce<float>(table, out, op, stream);
        case DType::kF16:
            return launch_reduce<F16>(table, out, op, stream);
        case DType::kBF16:
            return launch_reduce<BF16>(table, out, op, stream);
        case DType::kF64:
            return launch_reduce<double>(table, out, op, stream);
        case DType::kI8:
            return launch_reduce<int8_t>(table, out, op, stream);
        case DType::kU8:
            return launch_reduce<uint8_t>(table, out, op, stream);
        case DType::kI32:
            return launch_reduce<int32_t>(table, out, op, stream);
        case DType::kI64:
            return launch_reduce<int64_t>(table, out, op, stream);
    }
}

}  // namespace pycomm::cuda
