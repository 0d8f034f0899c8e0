#include "kernels/entries.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <type_traits>

#include "base/error.h"
#include "base/parallel.h"
#include "kernels/cpu/elements.h"
#include "kernels/cpu/pieces.h"

namespace pycomm {
namespace {

// The power of two that brings `largest` below, and near, the top of float16.
float scale_for(float largest) {
    if (!(largest > 0.0f) || !std::isfinite(largest)) return 1.0f;
    int exponent = 0;
    std::frexp(largest, &exponent);  // largest <= 2 ** exponent
    return std::ldexp(1.0f, std::clamp(15 - exponent, -126, 126));
}

// The value of an entry as it is sent, as it is added up, and what is left of it here.
template <class T>
struct Values {
    using Sum = T;
    static T sent(T value, float) { return value; }
    static T received(T value, float) { return value; }
    static T left(T, float) { return 0; }
};
template <>
struct Values<F16> {
    using Sum = float;
    static F16 sent(float value, float scale) { return to_f16(value * scale); }
    static float received(F16 value, float scale) { return to_float(value) / scale; }
    static float left(float value, float scale) { return value - received(sent(value, scale), scale); }
};

float scale_in(const EntryLayout& layout, const char* message) {
    return layout.half ? load_element<float>(message + layout.scale_at, 0) : 1.0f;
}

template <class F>
void with_sent_type(const EntryLayout& layout, F&& f) {
    if (layout.half) return f(F16{});
    if (layout.dtype == DType::kF64) return f(double{});
    f(float{});
}

void clear_padding(char* message, int64_t begin, int64_t end) {
    std::memset(message + begin, 0, static_cast<size_t>(end - begin));
}

template <class T>
void pack_values(const EntryLayout& layout, const Taken& taken, char* message) {
    using Sum = typename Values<T>::Sum;
    const float scale = scale_in(layout, message);
    for (int64_t m = 0; m < layout.count; ++m) {
        const Sum value = load_element<Sum>(taken.values, m);
        const int64_t index = taken.indices[m];
        store_element(message + layout.values_at, m, Values<T>::sent(value, scale));
        store_element(taken.flat, index, Values<T>::left(value, scale));
        if (taken.velocity == nullptr || (taken.keeps != nullptr && taken.keeps[m] != 0)) continue;
        store_element(taken.velocity, index, Sum(0));
    }
    clear_padding(message, layout.values_at + layout.count * static_cast<int64_t>(sizeof(T)), layout.words_at);
}

template <class T>
double largest_in(const EntryLayout& layout, const char* message) {
    const float scale = scale_in(layout, message);
    double largest = 0.0;
    for (int64_t m = 0; m < layout.count; ++m) {
        auto value =
            std::fabs(static_cast<double>(Values<T>::received(load_element<T>(message + layout.values_at, m), scale)));
        if (value != value || value > largest) largest = value;
        if (value != value) break;
    }
    return largest;
}

class Messages {
   public:
    Messages(const EntryLayout& layout, const char* messages, int num_ranks)
        : layout_(layout), messages_(messages), num_ranks_(num_ranks) {}

    const char* operator[](int rank) const { return messages_ + rank * layout_.num_bytes; }
    uint8_t code(int rank, int64_t place) const { return static_cast<uint8_t>((*this)[rank][place]); }

    bool any_uses(int64_t param) const {
        for (int rank = 0; rank < num_ranks_; ++rank) {
            if (code(rank, param) != kUnused) return true;
        }
        return false;
    }
    bool differ_in(int64_t bit) const {
        for (int rank = 1; rank < num_ranks_; ++rank) {
            if (code(rank, layout_.num_params + bit) != code(0, layout_.num_params + bit)) return true;
        }
        return false;
    }
    // 1 + the first parameter that is not finite on `rank`, or 0.
    int64_t source(int rank) const {
        for (int64_t j = 0; j < layout_.num_params; ++j) {
            if (code(rank, j) == kNotFinite) return j + 1;
        }
        return 0;
    }

   private:
    const EntryLayout& layout_;
    const char* messages_;
    int num_ranks_;
};

// Restores the state from before the step in a part.
void undo(const EntryLayout& layout, const Outcome& outcome, Range part) {
    const int64_t size = size_of(layout.dtype);
    for (const StateChange& state : outcome.states) {
        std::memcpy(state.now + part.begin * size, state.before + part.begin * size,
                    static_cast<size_t>(part.size() * size));
    }
}

// The same for the unused parameters in it.
void undo_unused(const EntryLayout& layout, const Outcome& outcome, Range part) {
    for (int64_t j = 0; j < layout.num_params; ++j) {
        const Range param{std::max(j == 0 ? 0 : outcome.ends[j - 1], part.begin), std::min(outcome.ends[j], part.end)};
        if (outcome.used[j] == 0 && param.size() > 0) undo(layout, outcome, param);
    }
}

// pack_indices allows repeated indices. A repeated entry would be taken out of the sums once, but added twice.
void require_different(const int32_t* indices, int64_t count) {
    const int32_t* const found = std::adjacent_find(indices, indices + count);
    if (found == indices + count) return;
    throw ArgumentError(format("indices[%lld] is %d, as is the one before it, wanted every index once",
                               static_cast<long long>(found - indices + 1), *found));
}

void unpack_words(const EntryLayout& layout, const char* message, int rank, int32_t* indices) {
    try {
        unpack_indices(reinterpret_cast<const uint32_t*>(message + layout.words_at), layout.count, layout.limit,
                       indices);
        require_different(indices, layout.count);
    } catch (const ArgumentError& error) {
        throw ArgumentError(format("messages: rank %d's was not made by pack_entries: %s", rank, error.what()));
    }
}

// Requires indices as unpack_entries writes them: others could lead out of a tile.
void require_ascending(const EntryLayout& layout, const int32_t* indices, int rank) {
    const int32_t* const end = indices + layout.count;
    const bool ascending = std::adjacent_find(indices, end, std::greater_equal<>()) == end;
    if (ascending && indices[0] >= 0 && end[-1] < layout.limit) return;
    throw ArgumentError(
        format("indices of rank %d do not ascend within 0 <= index < %lld, wanted those that "
               "unpack_entries writes",
               rank, static_cast<long long>(layout.limit)));
}

// Elements of one tile of sums, small enough for the nearest cache.
constexpr int64_t kTileElems = 4096;

template <class T, class Out>
void add_tile(const EntryLayout& layout, const Messages& messages, int num_ranks, const int32_t* indices,
              typename Values<T>::Sum factor, char* out, Range part, Store store) {
    using Sum = typename Values<T>::Sum;
    Sum tile[kTileElems] = {};
    for (int rank = 0; rank < num_ranks; ++rank) {
        const int32_t* from = indices + rank * layout.count;
        const float scale = scale_in(layout, messages[rank]);
        int64_t m = std::lower_bound(from, from + layout.count, part.begin) - from;
        for (; m < layout.count && from[m] < part.end; ++m) {
            tile[from[m] - part.begin] +=
                Values<T>::received(load_element<T>(messages[rank] + layout.values_at, m), scale) * factor;
        }
    }
    if constexpr (std::is_same_v<Sum, Out>) {
        const auto size = static_cast<int64_t>(sizeof(Out));
        loops().copy(tile, out + part.begin * size, part.size() * size, store);
    } else {
        for (int64_t i = part.begin; i < part.end; ++i) store_element(out, i, narrow<Out>(tile[i - part.begin]));
    }
}

}  // namespace

void pack_entries(const EntryLayout& layout, const Taken& taken, char* message) {
    pack_indices(taken.indices, layout.count, layout.limit, reinterpret_cast<uint32_t*>(message + layout.words_at));
    require_different(taken.indices, layout.count);
    clear_padding(message, layout.words_at + layout.num_words * 4, layout.num_bytes);
    clear_padding(message, layout.num_params, layout.values_at);
    for (int64_t j = 0; j < layout.num_params; ++j)
        message[j] = static_cast<char>(taken.finite[j] != 0 ? kUsed : kNotFinite);
    for (int64_t bit = 0; bit < layout.num_bits && taken.fingerprint != nullptr; ++bit) {
        message[layout.num_params + bit] = taken.fingerprint[bit] != 0 ? 1 : 0;
    }
    if (layout.half) store_element(message + layout.scale_at, 0, scale_for(*taken.largest));
    with_sent_type(layout, [&](auto type) { pack_values<decltype(type)>(layout, taken, message); });
}

void unpack_entries(const EntryLayout& layout, const char* bytes, int num_ranks, double factor, double most,
                    int32_t* indices, char* verdict) {
    const VerdictLayout at(layout, num_ranks);
    const Messages messages(layout, bytes, num_ranks);
    bool finite = true;
    double sum = 0.0;
    for (int rank = 0; rank < num_ranks; ++rank) {
        unpack_words(layout, messages[rank], rank, indices + rank * layout.count);
        with_sent_type(layout, [&](auto type) { sum += largest_in<decltype(type)>(layout, messages[rank]); });
        const int64_t source = messages.source(rank);
        store_element(verdict + at.sources_at, rank, source);
        finite = finite && source == 0;
    }
    for (int64_t j = 0; j < layout.num_params; ++j) verdict[at.used_at + j] = messages.any_uses(j) ? 1 : 0;
    for (int64_t bit = 0; bit < layout.num_bits; ++bit)
        verdict[at.differing_at + bit] = messages.differ_in(bit) ? 1 : 0;
    verdict[at.finite_at] = finite && std::fabs(sum * factor) <= most ? 1 : 0;
}

void add_entries(const EntryLayout& layout, const char* bytes, int num_ranks, const int32_t* indices, double factor,
                 const Outcome& outcome, const char* verdict, int num_threads) {
    const Messages messages(layout, bytes, num_ranks);
    const bool finite = outcome.finite == nullptr || *outcome.finite != 0;
    for (int rank = 0; rank < num_ranks; ++rank) require_ascending(layout, indices + rank * layout.count, rank);
    if (!finite) {
        factor = std::nan("");
        const VerdictLayout at(layout, num_ranks);
        if (outcome.last_sources != nullptr) {
            std::memcpy(outcome.last_sources, verdict + at.sources_at, static_cast<size_t>(num_ranks) * 8);
        }
    }
    const int threads = useful_threads(outcome.out.num_bytes(), num_threads);
    const int64_t num_tiles = (layout.limit + kTileElems - 1) / kTileElems;
    parallel_for(threads, threads, [&](int thread) {
        const Range tiles = piece_of(num_tiles, thread, threads, 1);
        for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
            const Range part{tile * kTileElems, std::min((tile + 1) * kTileElems, layout.limit)};
            if (!finite) {
                undo(layout, outcome, part);
            } else if (outcome.used != nullptr) {
                undo_unused(layout, outcome, part);
            }
            with_sent_type(layout, [&](auto sent) {
                using T = decltype(sent);
                with_float_type(outcome.out.dtype, [&](auto type) {
                    add_tile<T, decltype(type)>(layout, messages, num_ranks, indices,
                                                static_cast<typename Values<T>::Sum>(factor), outcome.out.bytes(), part,
                                                store_of(outcome.out));
                });
            });
        }
    });
}

}  // namespace pycomm
