// low_rank: matrices M as products P Q^T of two matrices with few columns (PowerSGD).
//
//   accumulate_low_rank: accumulate (accumulate.h), of which each gradient is a matrix M, and P = M Q
//   split_low_rank:      Q = M^T P, then M -= P Q^T
//   orthogonalize:       the columns of each P become orthonormal, from the first on
//   expand_low_rank:     out = factor * P Q^T
//
// M has n rows and m columns, P has n rows, Q has m, both have r columns, 1 <= r <= n and r <= m. All are row by row.
// The matrices of a call, of one type, float32 or float64, lie one after the other in a flat array of all M, one of all
// P and one of all Q.
//
// Sums are of that type, with every product rounded before it is added. An element of M Q is the sum of 64 /
// itemsize sums, each of every so-manieth product, added up by halves; of M^T P and P Q^T, one sum in the order of the
// index. So bits depend neither on the number of threads nor on the set of instructions. -P Q^T is added to M product
// by product; factor multiplies P.
//
// orthogonalize works in double: each column loses its parts along those before it, twice (Giraud et al., "The
// orthogonality in the Gram-Schmidt orthogonalization process", 2005). Where less than
// 1e-13 of its length is left, a unit vector takes its place: a P of zeros gets the first ones. Elements that are not
// finite spread. On a GPU one block works on each P, and its sums have another fixed order.
//
// Bound by memory for small r: accumulate_low_rank and split_low_rank move no more than accumulate and one pass that
// reads and writes M. On GPUs only orthogonalize exists: cuBLAS (torch.mm) is fast at these products there. On a CPU
// torch's take up to thirty times as long as reading M.
//
// An output overlaps no other array of the call.
#pragma once

#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "kernels/accumulate.h"
#include "kernels/on_device.h"

namespace pycomm {

struct LowRankShape {
    int64_t rows, columns, rank;
};

// What is left of a column of length 1 is a direction, and not the rounding errors alone, from this length on.
inline constexpr double kShortestColumn = 1e-13;

// q, p: flat, of acc's type.
void accumulate_low_rank(const Accumulation& job, double scale, bool* finite, const std::vector<LowRankShape>& shapes,
                         const void* q, void* p, int num_threads);
void split_low_rank(const Buffer& m, const std::vector<LowRankShape>& shapes, const void* p, void* q, int num_threads);
void orthogonalize(const Buffer& p, const std::vector<LowRankShape>& shapes, int num_threads);
void expand_low_rank(const Buffer& out, const std::vector<LowRankShape>& shapes, const void* p, const void* q,
                     double factor, int num_threads);

namespace cuda {

int64_t orthogonalize_workspace_bytes(const std::vector<LowRankShape>& shapes);
void orthogonalize(const Buffer& p, const std::vector<LowRankShape>& shapes, Workspace& workspace, Stream stream);

}  // namespace cuda
}  // namespace pycomm
