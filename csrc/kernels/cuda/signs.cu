#include "kernels/signs.h"

#include "device/launch.h"
#include "kernels/cuda/bits.h"
#include "kernels/cuda/table.h"

namespace pycomm::cuda {
namespace {

constexpr int kCount = 4;  // elements that move in one access

using Floats = Packet<float, kCount>;

struct Signing {
    const char* x;
    int64_t count;
    const float* magnitude;
    uint32_t* words;
    char* remainder;
};

// The signs of elements from `at` on, the first one's in bit 0. Writes what is left of them.
template <int kElems>
PYCOMM_DEVICE uint32_t signs_of(const Signing& job, int64_t at, const Packet<float, kElems>& x, uint32_t magnitude) {
    Packet<float, kElems> left;
    uint32_t signs = 0;
#pragma unroll
    for (int e = 0; e < kElems; ++e) {
        uint32_t sign = device::bits_of(x.values[e]) & 0x80000000u;
        signs |= sign >> (31 - e);
        left.values[e] = x.values[e] - device::float_of(magnitude | sign);
    }
    if (job.remainder != nullptr) store_packet<float, kElems>(job.remainder, at, left);
    return signs;
}

// A warp takes a chunk of whole words, four packets per lane.
PYCOMM_KERNEL pack_kernel(Signing job) {
    int warp = device::thread_index() / device::kWarpSize, warps = device::num_threads() / device::kWarpSize;
    int64_t chunk = static_cast<int64_t>(device::block_index()) * warps + warp;
    int64_t begin = chunk * kChunkElems;
    if (begin >= job.count) return;  // the whole warp
    int64_t first = begin + device::thread_index() % device::kWarpSize * kCount;
    uint32_t magnitude = device::bits_of(*job.magnitude) & 0x7fffffffu;
    uint32_t signs[kRows] = {};
    Floats x[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        int64_t at = first + r * kRowElems;
        if (at + kCount <= job.count) x[r] = load_packet<float, kCount>(job.x, at);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        int64_t at = first + r * kRowElems;
        if (at + kCount <= job.count) {
            signs[r] = signs_of<kCount>(job, at, x[r], magnitude);
            continue;
        }
        for (int e = 0; at + e < job.count; ++e) {
            signs[r] |= signs_of<1>(job, at + e, load_packet<float, 1>(job.x, at + e), magnitude) << e;
        }
    }
    write_words(signs, job.words + chunk * kChunkWords, (job.count - begin + 31) / 32);
}

// `words` and `magnitudes`: an entry for each contribution.
PYCOMM_KERNEL unpack_kernel(const Entry* words, const Entry* magnitudes, int num_contributions, char* out,
                            int64_t count, Scale scale) {
    auto thread = static_cast<int64_t>(device::block_index()) * device::num_threads() + device::thread_index();
    int64_t at = thread * kCount;
    if (at >= count) return;
    Floats sum = {};
#pragma unroll 4
    for (int p = 0; p < num_contributions; ++p) {
        uint32_t magnitude = device::bits_of(*reinterpret_cast<const float*>(magnitudes[p].data));
        uint32_t signs = reinterpret_cast<const uint32_t*>(words[p].data)[at / 32] >> (at % 32);
#pragma unroll
        for (int e = 0; e < kCount; ++e) {
            sum.values[e] = sum.values[e] + device::float_of(magnitude ^ ((signs >> e & 1u) << 31));
        }
    }
    auto factor = factor_of<float>(scale);
#pragma unroll
    for (int e = 0; e < kCount; ++e) sum.values[e] = sum.values[e] * factor;
    if (at + kCount <= count) return store_packet<float, kCount>(out, at, sum);
    for (int e = 0; at + e < count; ++e) store_element(out, at + e, sum.values[e]);
}

}  // namespace

void pack_signs(const Buffer& x, const float* magnitude, uint32_t* words, float* remainder, Stream stream) {
    if (x.count == 0) return;
    Signing job{x.bytes(), x.count, magnitude, words, reinterpret_cast<char*>(remainder)};
    int64_t per_block = device::threads_per_block() / device::kWarpSize * int64_t{kChunkElems};
    device::launch("pack_signs", pack_kernel, blocks_for(x.count, per_block), stream, job);
}

int64_t unpack_signs_workspace_bytes(std::size_t num_contributions) { return table_bytes(2 * num_contributions); }

void unpack_signs(const std::vector<const uint32_t*>& words, const std::vector<const float*>& magnitudes,
                  const Buffer& out, Scale factor, Workspace& workspace, Stream stream) {
    if (out.count == 0) return;
    std::vector<Buffer> arrays;
    for (const uint32_t* p : words) arrays.push_back({const_cast<uint32_t*>(p), (out.count + 31) / 32, DType::kI32});
    for (const float* p : magnitudes) arrays.push_back({const_cast<float*>(p), 1, DType::kF32});
    const Entry* entries = upload(arrays, workspace, stream).entries;
    const auto num_contributions = static_cast<int>(words.size());
    device::launch("unpack_signs", unpack_kernel, blocks_for(out.count, device::threads_per_block() * kCount), stream,
                   entries, entries + num_contributions, num_contributions, out.bytes(), out.count, factor);
}

}  // namespace pycomm::cuda
