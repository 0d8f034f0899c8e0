#include "kernels/quantize.h"

#include "base/parallel.h"
#include "kernels/cpu/loops/loops.h"

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

void dequantize(const std::vector<const float*>& scales, const std::vector<const uint8_t*>& codes,
                const Quantization& config, const Buffer& out, double factor, int num_threads) {
    int threads = useful_threads(out.num_bytes(), num_threads);
    parallel_for(threads, threads, [&](int thread) {
        Range mine = piece_of(out.count, thread, threads, config.block);
        if (mine.size() == 0) return;
        std::vector<const float*> my_scales(scales);
        std::vector<const uint8_t*> my_codes(codes);
        for (auto& p : my_scales) p += mine.begin / config.block;
        for (auto& p : my_codes) p += mine.begin * config.bits / 8;
        loops().dequantize(my_scales.data(), my_codes.data(), static_cast<int>(my_scales.size()), config,
                           static_cast<float*>(out.data) + mine.begin, mine.size(), static_cast<float>(factor));
    });
}

}  // namespace pycomm
