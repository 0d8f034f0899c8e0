#include "kernels/quantize.h"

#include "base/parallel.h"
#include "kernels/cpu/loops/loops.h"

namespace pycomm {

void quantize(const Buffer& x, const Quantization& how, const int64_t* seed, float* units, uint8_t* codes,
              float* remainder, int num_threads) {
    int threads = useful_threads(x.num_bytes(), num_threads);
    parallel_for(threads, threads, [&](int thread) {
        Range mine = piece_of(x.count, thread, threads, how.block);
        if (mine.size() == 0) return;
        loops().quantize(static_cast<const float*>(x.data) + mine.begin, mine.size(), mine.begin, how, seed,
                         units + mine.begin / how.block, codes + mine.begin * how.bits / 8,
                         remainder == nullptr ? nullptr : remainder + mine.begin);
    });
}

void dequantize(const std::vector<const float*>& units, const std::vector<const uint8_t*>& codes,
                const Quantization& how, const Buffer& out, double factor, int num_threads) {
    int threads = useful_threads(out.num_bytes(), num_threads);
    parallel_for(threads, threads, [&](int thread) {
        Range mine = piece_of(out.count, thread, threads, how.block);
        if (mine.size() == 0) return;
        std::vector<const float*> my_units(units);
        std::vector<const uint8_t*> my_codes(codes);
        for (auto& p : my_units) p += mine.begin / how.block;
        for (auto& p : my_codes) p += mine.begin * how.bits / 8;
        loops().dequantize(my_units.data(), my_codes.data(), static_cast<int>(my_units.size()), how,
                           static_cast<float*>(out.data) + mine.begin, mine.size(), static_cast<float>(factor));
    });
}

}  // namespace pycomm
