#include "kernels/cpu/loops/members.h"
#include "kernels/cpu/loops/simd.h"

namespace pycomm::PYCOMM_ISA {
namespace {

template <ReduceOp kOp>
inline Vec combine(Vec a, Vec b) {
    if constexpr (kOp == ReduceOp::kMin) return minimum(a, b);
    if constexpr (kOp == ReduceOp::kMax) return maximum(a, b);
    if constexpr (kOp == ReduceOp::kProduct) return mul(a, b);
    return add(a, b);
}

template <ReduceOp kOp, class T>
class FloatReduction {
   public:
    FloatReduction(void* const* outs, int num_outs, const void* const* inputs, int num_inputs, int num_streamed)
        : outs_(outs),
          num_outs_(num_outs),
          num_streamed_(num_streamed),
          inputs_(inputs),
          num_inputs_(num_inputs),
          inverse_(splat(1.0f / static_cast<float>(num_inputs))) {}

    void run(int64_t count) const {
        int64_t i = 0;
        if (num_streamed_ > 0) {
            for (; i + kBlock <= count; i += kBlock) block<true>(i);
            fence_streams();
        }
        for (; i + kBlock <= count; i += kBlock) block<false>(i);
        for (int64_t n; i < count; i += n) {
            n = count - i < kLanes ? count - i : kLanes;
            Vec sum = load_partial(input(0) + i, n);
            for (int p = 1; p < num_inputs_; ++p) sum = combine<kOp>(sum, load_partial(input(p) + i, n));
            for (int o = 0; o < num_outs_; ++o) store_partial(output(o) + i, finish(sum), n);
        }
    }

   private:
    static constexpr int kUnroll = 4;
    static constexpr int64_t kBlock = kUnroll * kLanes;

    const T* input(int p) const { return static_cast<const T*>(inputs_[p]); }
    T* output(int o) const { return static_cast<T*>(outs_[o]); }
    Vec finish(Vec sum) const { return kOp == ReduceOp::kMean ? mul(sum, inverse_) : sum; }

    template <bool kStreaming>
    void block(int64_t i) const {
        Vec sum[kUnroll];
        for (int u = 0; u < kUnroll; ++u) sum[u] = load(input(0) + i + u * kLanes);
        for (int p = 1; p < num_inputs_; ++p) {
            for (int u = 0; u < kUnroll; ++u) sum[u] = combine<kOp>(sum[u], load(input(p) + i + u * kLanes));
        }
        for (int u = 0; u < kUnroll; ++u) sum[u] = finish(sum[u]);
        int o = 0;
        if constexpr (kStreaming) {
            for (; o < num_streamed_; ++o) {
                for (int u = 0; u < kUnroll; ++u) stream(output(o) + i + u * kLanes, sum[u]);
            }
        }
        for (; o < num_outs_; ++o) {
            for (int u = 0; u < kUnroll; ++u) store(output(o) + i + u * kLanes, sum[u]);
        }
    }

    void* const* outs_;
    int num_outs_, num_streamed_;
    const void* const* inputs_;
    int num_inputs_;
    Vec inverse_;
};

template <ReduceOp kOp, class T>
inline T combine_scalars(T a, T b) {
    if constexpr (kOp == ReduceOp::kMin) return a != a || a < b ? a : b;
    if constexpr (kOp == ReduceOp::kMax) return a != a || a > b ? a : b;
    if constexpr (std::is_integral_v<T>) {  // wraps around, as torch's does
        using Unsigned = std::make_unsigned_t<T>;
        auto x = static_cast<Unsigned>(a), y = static_cast<Unsigned>(b);
        if constexpr (kOp == ReduceOp::kProduct) return static_cast<T>(static_cast<Unsigned>(x * y));
        if constexpr (kOp == ReduceOp::kAnd) return static_cast<T>(x & y);
        if constexpr (kOp == ReduceOp::kOr) return static_cast<T>(x | y);
        if constexpr (kOp == ReduceOp::kXor) return static_cast<T>(x ^ y);
        return static_cast<T>(static_cast<Unsigned>(x + y));
    } else {
        return kOp == ReduceOp::kProduct ? a * b : a + b;
    }
}

// double and the integers: a plain loop that the compiler vectorizes.
template <ReduceOp kOp, class T>
void reduce_scalars(void* const* outs, int num_outs, const void* const* inputs, int num_inputs, int64_t count) {
    constexpr int64_t kBlock = 4096 / sizeof(T);
    T sum[kBlock];
    for (int64_t begin = 0; begin < count; begin += kBlock) {
        int64_t n = count - begin < kBlock ? count - begin : kBlock;
        size_t bytes = static_cast<size_t>(n) * sizeof(T);
        int64_t offset = begin * static_cast<int64_t>(sizeof(T));
        std::memcpy(sum, static_cast<const char*>(inputs[0]) + offset, bytes);
        for (int p = 1; p < num_inputs; ++p) {
            const char* from = static_cast<const char*>(inputs[p]) + offset;
            for (int64_t i = 0; i < n; ++i) sum[i] = combine_scalars<kOp>(sum[i], load_element<T>(from, i));
        }
        if constexpr (kOp == ReduceOp::kMean) {
            const double inverse = 1.0 / num_inputs;
            for (int64_t i = 0; i < n; ++i) sum[i] = static_cast<T>(static_cast<double>(sum[i]) * inverse);
        }
        for (int o = 0; o < num_outs; ++o) std::memcpy(static_cast<char*>(outs[o]) + offset, sum, bytes);
    }
}

// Sums and products of integers have the same bytes for signed and unsigned ones, bitwise operations for elements of
// any size.
template <ReduceOp kOp>
void reduce_typed(void* const* outs, int num_outs, const void* const* inputs, int num_inputs, DType dtype,
                  int64_t count, int num_streamed) {
    if constexpr (is_bitwise(kOp)) {
        return reduce_scalars<kOp, uint8_t>(outs, num_outs, inputs, num_inputs, count * size_of(dtype));
    } else {
        if constexpr (kOp != ReduceOp::kMean) {
            constexpr bool kSigned = kOp == ReduceOp::kMin || kOp == ReduceOp::kMax;
            using Byte = std::conditional_t<kSigned, int8_t, uint8_t>;
            if (dtype == DType::kI8) return reduce_scalars<kOp, Byte>(outs, num_outs, inputs, num_inputs, count);
            if (dtype == DType::kU8) return reduce_scalars<kOp, uint8_t>(outs, num_outs, inputs, num_inputs, count);
            if (dtype == DType::kI32) return reduce_scalars<kOp, int32_t>(outs, num_outs, inputs, num_inputs, count);
            if (dtype == DType::kI64) return reduce_scalars<kOp, int64_t>(outs, num_outs, inputs, num_inputs, count);
        }
        if (dtype == DType::kF64) return reduce_scalars<kOp, double>(outs, num_outs, inputs, num_inputs, count);
        with_float_type(dtype, [&](auto* t) {
            using T = std::remove_pointer_t<decltype(t)>;
            FloatReduction<kOp, T>(outs, num_outs, inputs, num_inputs, num_streamed).run(count);
        });
    }
}

}  // namespace

void reduce(void* const* outs, int num_outs, const void* const* inputs, int num_inputs, DType dtype, ReduceOp op,
            int64_t count, int num_streamed) {
    for (int o = 0; o < num_streamed; ++o) {
        if (!is_aligned(outs[o], 64)) num_streamed = 0;
    }
    switch (op) {
        case ReduceOp::kSum:
            return reduce_typed<ReduceOp::kSum>(outs, num_outs, inputs, num_inputs, dtype, count, num_streamed);
        case ReduceOp::kMean:
            return reduce_typed<ReduceOp::kMean>(outs, num_outs, inputs, num_inputs, dtype, count, num_streamed);
        case ReduceOp::kMin:
            return reduce_typed<ReduceOp::kMin>(outs, num_outs, inputs, num_inputs, dtype, count, num_streamed);
        case ReduceOp::kMax:
            return reduce_typed<ReduceOp::kMax>(outs, num_outs, inputs, num_inputs, dtype, count, num_streamed);
        case ReduceOp::kProduct:
            return reduce_typed<ReduceOp::kProduct>(outs, num_outs, inputs, num_inputs, dtype, count, num_streamed);
        case ReduceOp::kAnd:
            return reduce_typed<ReduceOp::kAnd>(outs, num_outs, inputs, num_inputs, dtype, count, num_streamed);
        case ReduceOp::kOr:
            return reduce_typed<ReduceOp::kOr>(outs, num_outs, inputs, num_inputs, dtype, count, num_streamed);
        case ReduceOp::kXor:
            return reduce_typed<ReduceOp::kXor>(outs, num_outs, inputs, num_inputs, dtype, count, num_streamed);
    }
}

}  // namespace pycomm::PYCOMM_ISA
