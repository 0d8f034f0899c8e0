// pack: casts and scales many arrays into one, and checks that all of it is finite.
//
//   out[offset_j + i] = cast(srcs[j][i] * scale),  offset_j = count_0 + ... + count_{j-1}
//
// The arrays are of floating types, in any combination. The product is computed in float, or in double where either
// side is double, and rounded once per conversion, to the nearest even (double to a half type rounds through float).
// The result is finite if every value *written* is, so an overflow in the cast counts, and if every src * scale is
// below `limit` in magnitude, where that is given (as a float, unless computed in double). srcs and out may be empty
// and of any alignment. out overlaps no source, except one of out's dtype that lies exactly at its place in out. A
// source whose data is null counts as zeros.
//
// Flags, where they are wanted, are elements of out's dtype, 1 or 0, in this order: one per source, whether it has
// data; one, whether not all is finite; num_bits bits, and the same bits inverted. Where `bits` is null, all of these
// are 0.
#pragma once

#include <vector>

#include "base/buffer.h"
#include "base/parallel.h"
#include "kernels/on_device.h"

namespace pycomm {

struct PackFlags {
    char* out = nullptr;  // null: no flags are wanted
    const bool* bits = nullptr;
    int num_bits = 0;

    // The number of flags behind as many sources.
    int64_t count(std::size_t num_sources) const { return static_cast<int64_t>(num_sources) + 1 + 2 * num_bits; }
};

// Returns whether all is finite. Elements `skip` of out, and what belongs there, are neither read nor written.
bool pack(const std::vector<Buffer>& srcs, const Buffer& out, PackFlags flags, double scale, double limit,
          int num_threads, Range skip = {0, 0});

namespace cuda {

int64_t pack_workspace_bytes(std::size_t num_arrays);
// One launch for all srcs. *finite, on the device, says whether all is finite; may be null. Where *unless, on the
// device, is true, nothing is written (and *finite is true); may be null.
void pack(const std::vector<Buffer>& srcs, const Buffer& out, Scale scale, double limit, bool* finite,
          const bool* unless, Workspace& workspace, Stream stream);
// The same with flags: two launches, also where addresses are new (up to 159 of them).
void pack(const std::vector<Buffer>& srcs, const Buffer& out, PackFlags flags, Scale scale, double limit,
          Workspace& workspace, Stream stream);

}  // namespace cuda
}  // namespace pycomm
