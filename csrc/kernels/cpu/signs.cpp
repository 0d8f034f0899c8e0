#include "kernels/signs.h"

#include "base/parallel.h"
#include "kernels/cpu/loops/loops.h"
#include "kernels/cpu/pieces.h"

namespace pycomm {
namespace {

constexpr int64_t kAlign = 512;  // elements: whole cache lines of words for every thread

}  // namespace

void pack_signs(const Buffer& x, const float* magnitude, uint32_t* words, float* remainder, int num_threads) {
    int threads = useful_threads(x.num_bytes(), num_threads);
    parallel_for(threads, threads, [&](int thread) {
        Range mine = piece_of(x.count, thread, threads, kAlign);
        if (mine.size() == 0) return;
        loops().pack_signs(static_cast<const float*>(x.data) + mine.begin, mine.size(), *magnitude,
                           words + mine.begin / 32, remainder == nullptr ? nullptr : remainder + mine.begin);
    });
}

void unpack_signs(const std::vector<const uint32_t*>& words, const std::vector<const float*>& magnitudes,
                  const Buffer& out, double factor, int num_threads) {
    std::vector<float> of_each;
    for (const float* p : magnitudes) of_each.push_back(*p);
    int threads = useful_threads(out.num_bytes(), num_threads);
    parallel_for(threads, threads, [&](int thread) {
        Range mine = piece_of(out.count, thread, threads, kAlign);
        if (mine.size() == 0) return;
        std::vector<const uint32_t*> my_words(words);
        for (auto& p : my_words) p += mine.begin / 32;
        loops().unpack_signs(my_words.data(), of_each.data(), static_cast<int>(my_words.size()),
                             static_cast<float*>(out.data) + mine.begin, mine.size(), static_cast<float>(factor),
                             store_of(out));
    });
}

}  // namespace pycomm
