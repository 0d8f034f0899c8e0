#include "kernels/low_rank.h"

#include <algorithm>
#include <cmath>

#include "base/parallel.h"
#include "kernels/cpu/accumulation_pass.h"
#include "kernels/cpu/loops/loops.h"
#include "kernels/cpu/pieces.h"

namespace pycomm {
namespace {

constexpr int64_t kChunkBytes = 64 << 10;  // of rows: they are read again from the second cache

template <class T>
const ThinLoops<T>& thin_loops() {
    if constexpr (std::is_same_v<T, float>) {
        return loops().thin;
    } else {
        return loops().thin_double;
    }
}

// Where a matrix, its P and its Q begin in the flat arrays.
struct Place {
    LowRankShape shape;
    int64_t m, p, q;
};

std::vector<Place> places_of(const std::vector<LowRankShape>& shapes) {
    std::vector<Place> places;
    Place next{};
    for (const LowRankShape& shape : shapes) {
        next.shape = shape;
        places.push_back(next);
        next.m += shape.rows * shape.columns;
        next.p += shape.rows * shape.rank;
        next.q += shape.columns * shape.rank;
    }
    return places;
}

// Some rows of one matrix.
struct Rows {
    size_t matrix;
    int64_t begin, end;
};

template <class T>
std::vector<Rows> chunks_of(const std::vector<LowRankShape>& shapes) {
    std::vector<Rows> chunks;
    for (size_t j = 0; j < shapes.size(); ++j) {
        const int64_t row_bytes = shapes[j].columns * static_cast<int64_t>(sizeof(T));
        const int64_t step = std::max<int64_t>(kChunkBytes / row_bytes / 4 * 4, 4);
        for (int64_t begin = 0; begin < shapes[j].rows; begin += step) {
            chunks.push_back({j, begin, std::min(begin + step, shapes[j].rows)});
        }
    }
    return chunks;
}

// Calls use(chunk) for the chunks that are this thread's.
template <class Use>
void for_chunks(const std::vector<Rows>& chunks, int thread, int threads, Use&& use) {
    const Range mine = piece_of(static_cast<int64_t>(chunks.size()), thread, threads, 1);
    for (int64_t i = mine.begin; i < mine.end; ++i) use(chunks[static_cast<size_t>(i)]);
}

template <class T>
void transpose(const T* from, int64_t rows, int64_t columns, T* to) {
    for (int64_t i = 0; i < rows; ++i) {
        for (int64_t k = 0; k < columns; ++k) to[k * rows + i] = from[i * columns + k];
    }
}

// All Q, each column by column.
template <class T>
std::vector<T> transposed(const std::vector<Place>& places, const T* q) {
    const Place& last = places.back();
    std::vector<T> out(static_cast<size_t>(last.q + last.shape.columns * last.shape.rank));
    for (const Place& at : places) transpose(q + at.q, at.shape.columns, at.shape.rank, out.data() + at.q);
    return out;
}

template <class T>
void accumulate_typed(const Accumulation& job, double scale, bool* finite, const std::vector<LowRankShape>& shapes,
                      const T* q, T* p, int num_threads) {
    const AccumulationPass pass(job, scale, num_threads);
    const std::vector<Place> places = places_of(shapes);
    const std::vector<Rows> chunks = chunks_of<T>(shapes);
    const std::vector<T> turned = transposed(places, q);
    pass.run_threads(finite, [&](int thread, uint8_t* infinite) {
        std::vector<T> sums;
        for_chunks(chunks, thread, pass.num_threads(), [&](const Rows& chunk) {
            const Place& at = places[chunk.matrix];
            const int64_t columns = at.shape.columns;
            const Range part{at.m + chunk.begin * columns, at.m + chunk.end * columns};
            sums.resize(static_cast<size_t>(part.size()));
            if (!pass.sum_into(chunk.matrix, part, sums.data())) infinite[chunk.matrix] = 1;
            thin_loops<T>().rows(sums.data(), chunk.end - chunk.begin, columns, turned.data() + at.q, at.shape.rank,
                                 p + at.p + chunk.begin * at.shape.rank);
            pass.store(part, sums.data());
        });
    });
}

template <class T>
void split_typed(T* m, int64_t count, const std::vector<LowRankShape>& shapes, const T* p, T* q, int num_threads) {
    const std::vector<Place> places = places_of(shapes);
    const int threads = useful_threads(count * static_cast<int64_t>(sizeof(T)), num_threads);
    // Where there are several threads, each takes some columns of every matrix, whole lines of them.
    parallel_for(threads, threads, [&](int thread) {
        std::vector<T> turned;
        for (const Place& at : places) {
            const LowRankShape& shape = at.shape;
            const Range mine = piece_of(shape.columns, thread, threads, 64 / static_cast<int64_t>(sizeof(T)));
            if (mine.size() == 0) continue;
            turned.assign(static_cast<size_t>(mine.size() * shape.rank), T(0));
            T* const first = m + at.m + mine.begin;
            const int64_t row_bytes = mine.size() * static_cast<int64_t>(sizeof(T));
            const int64_t step = std::max<int64_t>(kChunkBytes / row_bytes / 4 * 4, 4);
            const int64_t last = (shape.rows - 1) / step * step;
            for (int64_t i = 0; i <= last; i += step) {
                thin_loops<T>().columns(first + i * shape.columns, shape.columns, std::min(step, shape.rows - i),
                                        mine.size(), p + at.p + i * shape.rank, shape.rank, turned.data(), mine.size());
            }
            transpose(turned.data(), shape.rank, mine.size(), q + at.q + mine.begin * shape.rank);
            for (int64_t i = last; i >= 0; i -= step) {  // from the end, which the caches still have
                thin_loops<T>().outer(p + at.p + i * shape.rank, std::min(step, shape.rows - i), shape.rank,
                                      turned.data(), mine.size(), first + i * shape.columns, shape.columns, mine.size(),
                                      T(-1), true);
            }
        }
    });
}

template <class T>
void expand_typed(const Buffer& out, const std::vector<LowRankShape>& shapes, const T* p, const T* q, double factor,
                  int num_threads) {
    const std::vector<Place> places = places_of(shapes);
    const std::vector<Rows> chunks = chunks_of<T>(shapes);
    const std::vector<T> turned = transposed(places, q);
    const Store store = store_of(out);
    const int threads = useful_threads(out.num_bytes(), num_threads);
    parallel_for(threads, threads, [&](int thread) {
        std::vector<T> products;
        for_chunks(chunks, thread, threads, [&](const Rows& chunk) {
            const Place& at = places[chunk.matrix];
            const int64_t columns = at.shape.columns, step = 4;
            products.resize(static_cast<size_t>(step * columns));
            for (int64_t i = chunk.begin; i < chunk.end; i += step) {
                const int64_t rows = std::min(step, chunk.end - i);
                thin_loops<T>().outer(p + at.p + i * at.shape.rank, rows, at.shape.rank, turned.data() + at.q, columns,
                                      products.data(), columns, columns, static_cast<T>(factor), false);
                loops().copy(products.data(), static_cast<T*>(out.data) + at.m + i * columns,
                             rows * columns * static_cast<int64_t>(sizeof(T)), store);
            }
        });
    });
}

// Columns of doubles, `n` long.
double product(const double* x, const double* y, int64_t n) {
    double sums[8] = {};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int u = 0; u < 8; ++u) sums[u] += x[i + u] * y[i + u];
    }
    for (; i < n; ++i) sums[0] += x[i] * y[i];
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

// Takes from column k its parts along those before it, twice; returns its length.
double project_out(double* columns, int64_t n, int64_t k) {
    double* const x = columns + k * n;
    for (int pass = 0; pass < 2; ++pass) {
        for (int64_t l = 0; l < k; ++l) {
            const double* const y = columns + l * n;
            const double along = product(y, x, n);
            for (int64_t i = 0; i < n; ++i) x[i] -= along * y[i];
        }
    }
    return std::sqrt(product(x, x, n));
}

void orthogonalize_columns(double* columns, int64_t n, int64_t rank) {
    for (int64_t k = 0; k < rank; ++k) {
        double* const x = columns + k * n;
        const double before = std::sqrt(product(x, x, n));
        if (before > 0.0) {  // so that squares of small elements do not vanish
            for (int64_t i = 0; i < n; ++i) x[i] /= before;
        }
        double length = project_out(columns, n, k);
        // Of the n unit vectors some one keeps at least 1 / sqrt(n) of its length: there are fewer than n columns.
        double shortest = kShortestColumn;
        for (int64_t unit = k; length < shortest; unit = (unit + 1) % n) {
            std::fill(x, x + n, 0.0);
            x[unit] = 1.0;
            length = project_out(columns, n, k);
            shortest = 0.5 / std::sqrt(static_cast<double>(n));
        }
        for (int64_t i = 0; i < n; ++i) x[i] /= length;
    }
}

template <class T>
void orthogonalize_typed(T* p, const std::vector<LowRankShape>& shapes, int num_threads) {
    const std::vector<Place> places = places_of(shapes);
    const Place& last = places.back();
    const int64_t num_bytes = (last.p + last.shape.rows * last.shape.rank) * static_cast<int64_t>(sizeof(T));
    const int threads = useful_threads(8 * num_bytes, num_threads);  // more work for each byte than a copy
    parallel_for(static_cast<int>(places.size()), threads, [&](int j) {
        const Place& at = places[static_cast<size_t>(j)];
        const int64_t n = at.shape.rows, rank = at.shape.rank;
        std::vector<double> columns(static_cast<size_t>(n * rank));
        T* const mine = p + at.p;
        for (int64_t i = 0; i < n * rank; ++i) columns[static_cast<size_t>(i % rank * n + i / rank)] = mine[i];
        orthogonalize_columns(columns.data(), n, rank);
        for (int64_t i = 0; i < n * rank; ++i) {
            mine[i] = static_cast<T>(columns[static_cast<size_t>(i % rank * n + i / rank)]);
        }
    });
}

// Calls use(T()), where T is float or double.
template <class Use>
void with_type(DType dtype, Use&& use) {
    dtype == DType::kF64 ? use(double()) : use(float());
}

}  // namespace

void accumulate_low_rank(const Accumulation& job, double scale, bool* finite, const std::vector<LowRankShape>& shapes,
                         const void* q, void* p, int num_threads) {
    if (shapes.empty()) return;
    with_type(job.acc.dtype, [&](auto zero) {
        using T = decltype(zero);
        accumulate_typed(job, scale, finite, shapes, static_cast<const T*>(q), static_cast<T*>(p), num_threads);
    });
}

void split_low_rank(const Buffer& m, const std::vector<LowRankShape>& shapes, const void* p, void* q, int num_threads) {
    if (shapes.empty()) return;
    with_type(m.dtype, [&](auto zero) {
        using T = decltype(zero);
        split_typed(static_cast<T*>(m.data), m.count, shapes, static_cast<const T*>(p), static_cast<T*>(q),
                    num_threads);
    });
}

void orthogonalize(const Buffer& p, const std::vector<LowRankShape>& shapes, int num_threads) {
    if (shapes.empty()) return;
    with_type(p.dtype, [&](auto zero) {
        using T = decltype(zero);
        orthogonalize_typed(static_cast<T*>(p.data), shapes, num_threads);
    });
}

void expand_low_rank(const Buffer& out, const std::vector<LowRankShape>& shapes, const void* p, const void* q,
                     double factor, int num_threads) {
    if (shapes.empty()) return;
    with_type(out.dtype, [&](auto zero) {
        using T = decltype(zero);
        expand_typed(out, shapes, static_cast<const T*>(p), static_cast<const T*>(q), factor, num_threads);
    });
}

}  // namespace pycomm
