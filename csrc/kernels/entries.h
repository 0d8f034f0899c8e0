// Messages of selected entries, one of each rank, and what becomes of them:
//
//   pack_entries     writes this rank's message, and takes out of the sums what it holds
//   unpack_entries   reads the messages of all ranks: their indices, and a verdict on the step
//   add_entries      writes the sum over the ranks, and restores state where the verdict demands it
//
// A message has four arrays, each on a border of 8 bytes:
//
//   codes    a byte for each parameter (kUnused, kUsed, kNotFinite), then one for each bit of a fingerprint
//   scale    one float32; only where the values are sent as float16
//   values   of the entries, in the sums' type; or, times the scale, as float16
//   words    their indices, ascending, each once and below `limit`, as pack_indices makes them
//
// The scale is the power of two that brings the largest magnitude to the top of float16, 1 if that is 0 or not finite.
//
// Messages come from other ranks and may hold anything. Nothing is ever read or written out of bounds.
//
// An output overlaps no other array of the call, except where said. Bools may hold any byte: all but 0 are true.
#pragma once

#include <cstdint>
#include <vector>

#include "base/buffer.h"
#include "kernels/indices.h"
#include "kernels/on_device.h"

namespace pycomm {

enum : uint8_t { kUnused = 0, kUsed = 1, kNotFinite = 2 };

inline constexpr int64_t kEntryAlignment = 8;
inline constexpr int64_t kEntryTile = 4096;  // elements that a GPU adds up in shared memory
inline int64_t aligned_entry(int64_t bytes) {
    return (bytes + kEntryAlignment - 1) / kEntryAlignment * kEntryAlignment;
}

// Where a message's arrays are, in bytes.
struct EntryLayout {
    int64_t num_params, num_bits, count, limit;
    DType dtype;  // of the sums: float32 or float64
    bool half;    // float32 values are sent as float16
    int64_t scale_at, values_at, words_at, num_words, num_bytes;
    int64_t num_tiles;  // of kEntryTile elements of the sums

    EntryLayout(int64_t params, int64_t bits, int64_t entries, int64_t range, DType sums, bool as_half)
        : num_params(params), num_bits(bits), count(entries), limit(range), dtype(sums), half(as_half) {
        scale_at = aligned_entry(num_params + num_bits);
        values_at = scale_at + (half ? kEntryAlignment : 0);
        words_at = values_at + aligned_entry(count * (half ? 2 : size_of(dtype)));
        num_words = IndexLayout(limit, count).num_words();
        num_bytes = words_at + aligned_entry(num_words * 4);
        num_tiles = (limit + kEntryTile - 1) / kEntryTile;
    }
};

// A verdict on a step: what the ranks' codes and values say, the same on all of them. In one piece of memory.
struct VerdictLayout {
    int64_t finite_at;   // a bool: no code is kNotFinite, and the sum over the ranks of the largest values is in range
    int64_t sources_at;  // int64 for each rank: 1 + its first parameter that is not finite, or 0
    int64_t used_at;     // a bool for each parameter: some rank has a gradient of it
    int64_t differing_at;  // a bool for each bit: ranks differ in it
    int64_t borders_at;  // for the GPU's kernels, as are the first 8 bytes; int32 for each tile of each rank: how many
                         // of its entries come before
    int64_t num_bytes;

    VerdictLayout(const EntryLayout& layout, int64_t num_ranks) {
        finite_at = 8;
        sources_at = 16;
        used_at = sources_at + 8 * num_ranks;
        differing_at = used_at + layout.num_params;
        borders_at = aligned_entry(differing_at + layout.num_bits);
        num_bytes = aligned_entry(borders_at + 4 * num_ranks * layout.num_tiles);
    }
};

// What goes into a message. values[m] was taken from flat[indices[m]].
struct Taken {
    const char* values = nullptr;
    const int32_t* indices = nullptr;
    const float* largest = nullptr;        // magnitude of the values; only where they are sent as float16
    char* flat = nullptr;                  // out: what is left there, the rounding error, or 0
    char* velocity = nullptr;              // out: 0 there; null: none
    const uint8_t* keeps = nullptr;        // for each entry, whether its velocity stays; null: none does
    const uint8_t* finite = nullptr;       // for each parameter
    const uint8_t* fingerprint = nullptr;  // null: zeros
};

// Array of state: `now` as it is after this step, `before` as it was.
struct StateChange {
    char* now;
    const char* before;
};

struct Outcome {
    Buffer out;                       // `limit` elements, of any floating type
    std::vector<StateChange> states;  // at most two, of `limit` elements of the sums' type; `before` may be out
    const uint8_t* finite = nullptr;  // whether the step is finite on all ranks; null: it is
    const uint8_t* used = nullptr;    // for each parameter, whether its change of state stays; null: all do
    const int64_t* ends = nullptr;    // of the parameters in out; where there is `used`
    int64_t* last_sources = nullptr;  // for each rank: becomes the verdict's sources if the step is not finite; or null
};

// Writes kUsed or kNotFinite as every parameter's code: the caller changes it for unused ones. If the indices do not
// ascend, throws ArgumentError; only the message is written then.
void pack_entries(const EntryLayout& layout, const Taken& taken, char* message);
// ArgumentError where pack_entries cannot have made the words. indices: `count` for each rank. In range: at most
// `most` in magnitude when multiplied by `factor`.
void unpack_entries(const EntryLayout& layout, const char* messages, int num_ranks, double factor, double most,
                    int32_t* indices, char* verdict);
// out = sum over the ranks, in their order, of value * factor. Changes of state are undone as `used` says. If the step
// is not finite, all of them are undone, and entries that were sent come out as NaN. If unpack_entries cannot have
// written the indices, throws ArgumentError; nothing is written then.
void add_entries(const EntryLayout& layout, const char* messages, int num_ranks, const int32_t* indices, double factor,
                 const Outcome& outcome, const char* verdict, int num_threads);

namespace cuda {

// Mistakes become faults; what is written then is meaningless.
//
// `verdict` is prepared for unpack_entries.
void pack_entries(const EntryLayout& layout, const Taken& taken, char* message, char* verdict, Stream stream);
int64_t unpack_entries_workspace_bytes(const EntryLayout& layout, int num_ranks);
void unpack_entries(const EntryLayout& layout, const char* messages, int num_ranks, Scale factor, double most,
                    int32_t* indices, char* verdict, Workspace& workspace, Stream stream);
// outcome.finite lies on the device; `verdict` was written by unpack_entries.
void add_entries(const EntryLayout& layout, const char* messages, int num_ranks, const int32_t* indices, Scale factor,
                 const Outcome& outcome, const char* verdict, Stream stream);

}  // namespace cuda
}  // namespace pycomm
