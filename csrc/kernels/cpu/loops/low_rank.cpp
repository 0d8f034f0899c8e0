#include "kernels/cpu/loops/members.h"

namespace pycomm::PYCOMM_ISA {
namespace {

#if defined(PYCOMM_ISA_AVX512)
constexpr int kVectorBytes = 64, kRowsAtOnce = 4, kSumsAtOnce = 4;
#elif defined(PYCOMM_ISA_AVX2)
constexpr int kVectorBytes = 32, kRowsAtOnce = 2, kSumsAtOnce = 2;
#else
constexpr int kVectorBytes = 16, kRowsAtOnce = 2, kSumsAtOnce = 1;
#endif
constexpr int kLineBytes = 64;
constexpr int kPartsOfLine = kLineBytes / kVectorBytes;

// The compiler's own vectors: the same code for both types, and only sums and products.
template <class T>
struct Numbers {
    typedef T Vector __attribute__((vector_size(kVectorBytes)));
    static constexpr int kCount = kVectorBytes / sizeof(T), kLine = kLineBytes / sizeof(T);

    static Vector load(const T* from) {
        Vector v;
        __builtin_memcpy(&v, from, sizeof v);
        return v;
    }
    static void store(T* to, Vector v) { __builtin_memcpy(to, &v, sizeof v); }
    static Vector splat(T x) { return x - Vector{}; }  // not x + 0, which would lose the sign of -0
};

// p[r][k] = sum over j of m[r][j] * q[k][j].
template <class T, int kRows, int kRanks>
inline void dot(const T* m, int64_t stride, int64_t columns, const T* q, T* p, int64_t rank) {
    using N = Numbers<T>;
    typename N::Vector sums[kRows][kRanks][kPartsOfLine] = {};
    int64_t j = 0;
    for (; j + N::kLine <= columns; j += N::kLine) {
        for (int part = 0; part < kPartsOfLine; ++part) {
            const int64_t at = j + part * N::kCount;
            typename N::Vector x[kRows];
            for (int r = 0; r < kRows; ++r) x[r] = N::load(m + r * stride + at);
            for (int k = 0; k < kRanks; ++k) {
                const typename N::Vector y = N::load(q + k * columns + at);
                for (int r = 0; r < kRows; ++r) sums[r][k][part] += x[r] * y;
            }
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int k = 0; k < kRanks; ++k) {
            T lanes[N::kLine];
            for (int part = 0; part < kPartsOfLine; ++part) N::store(lanes + part * N::kCount, sums[r][k][part]);
            for (int64_t i = j; i < columns; ++i) lanes[i - j] += m[r * stride + i] * q[k * columns + i];
            for (int half = N::kLine / 2; half > 0; half /= 2) {
                for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
            }
            p[r * rank + k] = lanes[0];
        }
    }
}

// q[k][j] += sum over r of m[r][j] * p[r][k].
template <class T, int kRows, int kRanks>
inline void dot_columns(const T* m, int64_t stride, int64_t columns, const T* p, int64_t rank, T* q, int64_t q_stride) {
    using N = Numbers<T>;
    typename N::Vector factors[kRows][kRanks];
    for (int r = 0; r < kRows; ++r) {
        for (int k = 0; k < kRanks; ++k) factors[r][k] = N::splat(p[r * rank + k]);
    }
    int64_t j = 0;
    for (; j + N::kCount <= columns; j += N::kCount) {
        typename N::Vector sums[kRanks];
        for (int k = 0; k < kRanks; ++k) sums[k] = N::load(q + k * q_stride + j);
        for (int r = 0; r < kRows; ++r) {
            const typename N::Vector x = N::load(m + r * stride + j);
            for (int k = 0; k < kRanks; ++k) sums[k] += x * factors[r][k];
        }
        for (int k = 0; k < kRanks; ++k) N::store(q + k * q_stride + j, sums[k]);
    }
    for (; j < columns; ++j) {
        for (int k = 0; k < kRanks; ++k) {
            for (int r = 0; r < kRows; ++r) q[k * q_stride + j] += m[r * stride + j] * p[r * rank + k];
        }
    }
}

// x[r][j] (+)= sum over k of (factor * p[r][k]) * q[k][j].
template <class T, int kRows, int kRanks>
inline void outer(const T* p, int64_t rank, const T* q, int64_t q_stride, T* x, int64_t stride, int64_t columns,
                  T factor, bool adds) {
    using N = Numbers<T>;
    T numbers[kRows][kRanks];
    typename N::Vector factors[kRows][kRanks];
    for (int r = 0; r < kRows; ++r) {
        for (int k = 0; k < kRanks; ++k) {
            numbers[r][k] = factor * p[r * rank + k];
            factors[r][k] = N::splat(numbers[r][k]);
        }
    }
    int64_t j = 0;
    for (; j + N::kCount <= columns; j += N::kCount) {
        typename N::Vector y[kRanks];
        for (int k = 0; k < kRanks; ++k) y[k] = N::load(q + k * q_stride + j);
        for (int r = 0; r < kRows; ++r) {
            T* const to = x + r * stride + j;
            typename N::Vector sum = factors[r][0] * y[0];
            if (adds) sum = N::load(to) + sum;
            for (int k = 1; k < kRanks; ++k) sum += factors[r][k] * y[k];
            N::store(to, sum);
        }
    }
    for (; j < columns; ++j) {
        for (int r = 0; r < kRows; ++r) {
            T sum = numbers[r][0] * q[j];
            if (adds) sum = x[r * stride + j] + sum;
            for (int k = 1; k < kRanks; ++k) sum += numbers[r][k] * q[k * q_stride + j];
            x[r * stride + j] = sum;
        }
    }
}

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

// Calls use(rows, first of them, ranks, first of them), with constants for the numbers, over all rows and ranks.
template <int kMostRanks, class Use>
inline void in_tiles(int64_t num_rows, int64_t rank, Use&& use) {
    auto over_ranks = [&](auto rows, int64_t r) {
        int64_t k = 0;
        for (; k + kMostRanks <= rank; k += kMostRanks) use(rows, r, Constant<kMostRanks>(), k);
        if constexpr (kMostRanks > 2) {
            if (k + 2 <= rank) use(rows, r, Constant<2>(), k), k += 2;
        }
        if constexpr (kMostRanks > 1) {
            if (k < rank) use(rows, r, Constant<1>(), k);
        }
    };
    int64_t r = 0;
    for (; r + kRowsAtOnce <= num_rows; r += kRowsAtOnce) over_ranks(Constant<kRowsAtOnce>(), r);
    for (; r < num_rows; ++r) over_ranks(Constant<1>(), r);
}

}  // namespace

template <class T>
void thin_rows(const T* m, int64_t rows, int64_t columns, const T* q, int64_t rank, T* p) {
    in_tiles<kSumsAtOnce>(rows, rank, [&](auto num_rows, int64_t r, auto num_ranks, int64_t k) {
        dot<T, num_rows(), num_ranks()>(m + r * columns, columns, columns, q + k * columns, p + r * rank + k, rank);
    });
}

template <class T>
void thin_columns(const T* m, int64_t stride, int64_t rows, int64_t columns, const T* p, int64_t rank, T* q,
                  int64_t q_stride) {
    in_tiles<4>(rows, rank, [&](auto num_rows, int64_t r, auto num_ranks, int64_t k) {
        dot_columns<T, num_rows(), num_ranks()>(m + r * stride, stride, columns, p + r * rank + k, rank,
                                                q + k * q_stride, q_stride);
    });
}

template <class T>
void thin_outer(const T* p, int64_t rows, int64_t rank, const T* q, int64_t q_stride, T* x, int64_t stride,
                int64_t columns, T factor, bool adds) {
    in_tiles<4>(rows, rank, [&](auto num_rows, int64_t r, auto num_ranks, int64_t k) {
        outer<T, num_rows(), num_ranks()>(p + r * rank + k, rank, q + k * q_stride, q_stride, x + r * stride, stride,
                                          columns, factor, adds || k > 0);
    });
}

template void thin_rows(const float*, int64_t, int64_t, const float*, int64_t, float*);
template void thin_rows(const double*, int64_t, int64_t, const double*, int64_t, double*);
template void thin_columns(const float*, int64_t, int64_t, int64_t, const float*, int64_t, float*, int64_t);
template void thin_columns(const double*, int64_t, int64_t, int64_t, const double*, int64_t, double*, int64_t);
template void thin_outer(const float*, int64_t, int64_t, const float*, int64_t, float*, int64_t, int64_t, float, bool);
template void thin_outer(const double*, int64_t, int64_t, const double*, int64_t, double*, int64_t, int64_t, double,
                         bool);

}  // namespace pycomm::PYCOMM_ISA
