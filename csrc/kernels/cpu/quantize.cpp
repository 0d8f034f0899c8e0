#include "kernels/quantize.h"

#include <algorithm>

#include "base/parallel.h"
#include "kernels/cpu/accumulation_pass.h"
#include "kernels/cpu/loops/loops.h"
#include "kernels/cpu/pieces.h"

namespace pycomm {

void quantize(const Buffer& x, const Quantization& config, const int64_t* seed, float* scales, uint8_t* codes,
              float* remainder, int num_threads) {
    int threads = useful_threads(x.num_bytes(), num_threads);
    parallel_for(threads, threads, [&](int thread) {
        Range mine = piece_of(x.count, thread, threads, config.block);
        if (mine.size() == 0) return;
        loops().quantize(static_cast<const float*>(x.data) + mine.begin, mine.size(), mine.begin, config, seed,
                         scales + mine.begin / config.block, codes + mine.begin * config.bits / 8,
                         remainder == nullptr ? nullptr : remainder + mine.begin);
    });
}

namespace {

// Calls use(range, scales, codes) for every thread's part of `count` elements, with its part of every contribution.
template <class Use>
void for_contributions(const std::vector<const float*>& scales, const std::vector<const uint8_t*>& codes,
                       const Quantization& config, int64_t count, int num_threads, Use&& use) {
    int threads = useful_threads(count * static_cast<int64_t>(sizeof(float)), num_threads);
    parallel_for(threads, threads, [&](int thread) {
        Range mine = piece_of(count, thread, threads, config.block);
        if (mine.size() == 0) return;
        std::vector<const float*> my_scales(scales);
        std::vector<const uint8_t*> my_codes(codes);
        for (auto& p : my_scales) p += mine.begin / config.block;
        for (auto& p : my_codes) p += mine.begin * config.bits / 8;
        use(mine, my_scales.data(), my_codes.data());
    });
}

}  // namespace

void dequantize(const std::vector<const float*>& scales, const std::vector<const uint8_t*>& codes,
                const Quantization& config, const Buffer& out, double factor, int num_threads) {
    for_contributions(scales, codes, config, out.count, num_threads,
                      [&](Range mine, const float* const* my_scales, const uint8_t* const* my_codes) {
                          loops().dequantize(my_scales, my_codes, static_cast<int>(scales.size()), config,
                                             static_cast<float*>(out.data) + mine.begin, mine.size(),
                                             static_cast<float>(factor), store_of(out));
                      });
}

void requantize(const std::vector<const float*>& scales, const std::vector<const uint8_t*>& codes, int64_t count,
                const Quantization& config, const int64_t* seed, const Requantized& out, int num_threads) {
    for_contributions(scales, codes, config, count, num_threads,
                      [&](Range mine, const float* const* my_scales, const uint8_t* const* my_codes) {
                          loops().requantize(my_scales, my_codes, static_cast<int>(scales.size()), mine.size(),
                                             mine.begin, config, seed, out.scales + mine.begin / config.block,
                                             out.codes + mine.begin * config.bits / 8,
                                             out.remainder == nullptr ? nullptr : out.remainder + mine.begin);
                      });
}

namespace {

constexpr int64_t kSumsAtOnce = 4096;  // elements, about

}  // namespace

void accumulate_quantized(const Accumulation& job, double scale, bool* finite, const Quantization& config,
                          const std::vector<QuantizedPart>& parts, bool keeps, int num_threads) {
    const AccumulationPass pass(job, scale, num_threads);
    const int64_t step = std::max<int64_t>(kSumsAtOnce / config.block, 1) * config.block;
    pass.run_threads(finite, [&](int thread, uint8_t* infinite) {
        int64_t end = 0;
        for (const QuantizedPart& part : parts) {
            pass.sum_range(thread, {end, part.begin}, infinite);
            end = part.begin + part.count;
            pass.sum_steps(thread, {part.begin, end}, step, keeps, infinite, [&](Range range, float* sums) {
                loops().quantize(sums, range.size(), range.begin, config, part.seed,
                                 part.scales + range.begin / config.block, part.codes + range.begin * config.bits / 8,
                                 keeps ? sums : nullptr);
            });
        }
        pass.sum_range(thread, {end, job.acc.count}, infinite);
    });
}

}  // namespace pycomm
