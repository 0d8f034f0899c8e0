// Collectives of SharedMemoryGroup, written with the methods of Call. See group.h for how each moves.

#include <algorithm>

#include "base/time.h"
#include "kernels/absmax.h"
#include "transport/shared_memory/moves.h"

namespace pycomm {
namespace {

// Up to this size every rank reduces the whole array on its own: reading P times as much costs less than one more step,
// which takes a time slice where ranks outnumber cores.
constexpr int64_t kRedundantBytes = 512, kRedundantBytesCrowded = 16 << 10;

Range part_of(int64_t count, int p, int size) { return piece_of(count, p, size, kPartAlign); }

struct Segments {
    int64_t count, max_elements;
    int64_t num() const { return (count + max_elements - 1) / max_elements; }
    Range operator[](int64_t i) const { return {i * max_elements, std::min(count, (i + 1) * max_elements)}; }
};

// Puts what the other ranks may read of x into this rank's mailbox: if they reduce by parts, not this rank's part.
void fill_mailbox(const Call& call, const Buffer& x) {
    const bool by_parts = x.num_bytes() > kRedundantBytesCrowded;
    const Range mine = by_parts ? part_of(x.count, call.rank(), call.size()) : Range{0, 0};
    const int64_t begin = mine.begin * size_of(x.dtype), end = mine.end * size_of(x.dtype);
    copy(call.mailbox(call.rank()), x.bytes(), begin);
    copy(call.mailbox(call.rank()) + end, x.bytes() + end, x.num_bytes() - end);
}

// A result is written over the inputs that it was made from: so the rank that reads a cache line is also the next to
// write it. Between some cores it is slow to overwrite a line that another core has read since (measured on a Zen 4: 64
// KB took 39 us instead of 8.5, with results in memory of their own).
void all_reduce_mailbox(Call& call, const Buffer& x, ReduceOp op) {
    const auto input = [&](int p) { return p == call.rank() ? x.bytes() : call.mailbox(p); };
    if (x.num_bytes() <= (call.is_crowded() ? kRedundantBytesCrowded : kRedundantBytes)) {
        return reduce_from(call, {x.data}, x.dtype, op, x.count, input);
    }
    const int64_t width = size_of(x.dtype);
    const Range mine = part_of(x.count, call.rank(), call.size());
    const int64_t begin = mine.begin * width, end = mine.end * width;
    std::vector<void*> outs = {x.bytes() + begin};
    for (int p = 0; p < call.size(); ++p) {
        if (p != call.rank()) outs.push_back(call.mailbox(p) + begin);
    }
    reduce_from(call, outs, x.dtype, op, mine.size(), [&](int p) { return input(p) + begin; });
    call.step();
    copy(x.bytes(), call.mailbox(call.rank()), begin);
    copy(x.bytes() + end, call.mailbox(call.rank()) + end, x.num_bytes() - end);
}

// Reduces this rank's share from `own` and the other ranks' arrays. All arrays lie in arenas.
float reduce_apart(const Call& call, const Buffer& x, const OwnPart& own, ReduceOp op) {
    float largest = 0.0f;
    const int64_t width = size_of(x.dtype), begin = own.begin * width;
    for_blocks_of(own.pieces, {0, own.count() * width}, [&](const Buffer& block, int64_t from_begin) {
        const int64_t offset = begin + from_begin;
        const bool is_elsewhere = block.data != x.bytes() + offset;
        if (is_elsewhere) largest = larger(largest, absmax({block}, 1));
        std::vector<void*> outs = {x.bytes() + offset};
        for (int p = 0; p < call.size(); ++p) {
            if (p != call.rank()) outs.push_back(call.in_arena(p) + offset);
        }
        // Only this rank's own output has not been read, so only that one is streamed.
        reduce_from(
            call, outs, x.dtype, op, block.count,
            [&](int p) { return p == call.rank() ? block.bytes() : call.in_arena(p) + offset; }, is_elsewhere ? 1 : 0);
    });
    return largest;
}

// Copies `own` into x. Returns the largest magnitude in what was copied.
float put_in_place(const Buffer& x, const OwnPart& own) {
    float largest = 0.0f;
    char* to = x.bytes() + own.begin * size_of(x.dtype);
    for (const Buffer& piece : own.pieces) {
        if (piece.data != to) {
            largest = larger(largest, absmax({piece}, 1));
            copy(to, piece.bytes(), piece.num_bytes());
        }
        to += piece.num_bytes();
    }
    return largest;
}

// The result goes to every rank, or to one. All ranks share the work either way; x stays unchanged on the others.
constexpr int kEveryRank = -1;

void all_reduce_direct(Call& call, const Buffer& x, ReduceOp op, int root = kEveryRank) {
    const Range mine = call.shares(x.num_bytes()).of(x.count, call.rank());
    int64_t offset = mine.begin * size_of(x.dtype);
    std::vector<void*> outs;
    for (int p = 0; p < call.size(); ++p) {
        if (root == kEveryRank || p == root) outs.push_back(call.in_arena(p) + offset);
    }
    reduce_from(call, outs, x.dtype, op, mine.size(), [&](int p) { return call.in_arena(p) + offset; });
    call.step();
}

// Arrays in arenas are read and written in place. The others pass through staging memory in pieces: a rank stages what
// the others need, and they write the results over it, for the reason given above.
void all_reduce_staged(Call& call, const Buffer& x, ReduceOp op, int root = kEveryRank) {
    const int me = call.rank();
    const int64_t width = size_of(x.dtype);
    const Staging how = call.how_to_stage();
    const Segments segments{x.count, how.segment_bytes / width};
    const Shares shares = call.shares(x.num_bytes());
    auto part = [&](int64_t segment, int p) { return shares.of(segments[segment].size(), p); };
    auto receives = [&](int p) { return root == kEveryRank || root == p; };
    auto lies_here = [&](int p) { return p == me || call.is_in_arena(p); };
    auto array = [&](int p, int64_t i) {  // only if lies_here(p)
        return (p == me ? x.bytes() : call.in_arena(p)) + segments[i].begin * width;
    };
    auto put = [&](char* to, const char* from, int64_t num_bytes) {
        copy(to, from, num_bytes);
        if (how.demotes) demote(to, num_bytes);
    };

    auto stage = [&](int64_t i) {  // all but the part that this rank reduces itself
        if (call.is_in_arena(me)) return;
        const Range mine = part(i, me);
        char* to = call.staged_input(me, i);
        put(to, array(me, i), mine.begin * width);
        put(to + mine.end * width, array(me, i) + mine.end * width, (segments[i].size() - mine.end) * width);
    };
    auto reduce_part = [&](int64_t i) {
        const Range mine = part(i, me);
        auto place = [&](int p) { return (lies_here(p) ? array(p, i) : call.staged_input(p, i)) + mine.begin * width; };
        std::vector<void*> outs;
        for (int p = 0; p < call.size(); ++p) {
            if (receives(p)) outs.push_back(place(p));
        }
        reduce_from(call, outs, x.dtype, op, mine.size(), place);
        for (int p = 0; p < call.size() && how.demotes; ++p) {
            if (receives(p) && !lies_here(p)) demote(place(p), mine.size() * width);
        }
    };
    auto fetch = [&](int64_t i) {
        const Range mine = part(i, me);
        const char* from = call.staged_input(me, i);
        copy(array(me, i), from, mine.begin * width);
        copy(array(me, i) + mine.end * width, from + mine.end * width, (segments[i].size() - mine.end) * width);
    };
    const double start = monotonic_seconds();
    pipeline(
        call, segments.num() + 1,
        [&](int64_t i) {
            if (i < segments.num()) stage(i);
            if (i > 0) reduce_part(i - 1);
        },
        [&](int64_t i) {
            if (i > 0 && receives(me) && !call.is_in_arena(me)) fetch(i - 1);
        });
    call.observe_staging(x.num_bytes(), monotonic_seconds() - start);
}

Operation announcement(const SharedMemoryGroup& group, Kind kind, const Buffer& x, ReduceOp op, int root) {
    return {.kind = kind,
            .dtype = x.dtype,
            .op = op,
            .tag = x.tag,
            .root = root,
            .count = x.count,
            .offset = group.offset_of(x)};
}

}  // namespace

void SharedMemoryGroup::all_reduce(const Buffer& x, ReduceOp op, double timeout) {
    all_reduce_apart(x, {}, op, timeout);
}

int64_t OwnPart::count() const {
    int64_t out = 0;
    for (const Buffer& piece : pieces) out += piece.count;
    return out;
}

Range SharedMemoryGroup::own_share(const Buffer& x) {
    const bool is_looked_at = x.dtype == DType::kF32 || x.dtype == DType::kF16 || x.dtype == DType::kBF16;
    if (size_ == 1 || !is_looked_at || x.num_bytes() < kUnequalBytes || offset_of(x) < 0) return {0, 0};
    const std::lock_guard<std::mutex> lock(mutex_);
    return Shares(slacks_, x.num_bytes()).of(x.count, rank_);
}

float SharedMemoryGroup::all_reduce_apart(const Buffer& x, const OwnPart& own, ReduceOp op, double timeout) {
    Call call(*this, "all_reduce", timeout);
    const bool in_mailbox = x.num_bytes() <= kMailboxBytes;
    Operation mine = announcement(*this, Kind::kAllReduce, x, op, 0);
    if (!own.pieces.empty()) {
        const Range share = call.shares(x.num_bytes()).of(x.count, rank_);
        const bool is_my_share = own.begin == share.begin && own.count() == share.size();
        mine.is_apart = size_ > 1 && !in_mailbox && mine.offset >= 0 && is_my_share;
        if (mine.is_apart == 0) call.note_largest(put_in_place(x, own));
    }
    if (in_mailbox) fill_mailbox(call, x);
    call.announce(mine);
    if (size_ == 1 || x.count == 0) return call.largest();
    if (in_mailbox) {
        all_reduce_mailbox(call, x, op);
    } else if (!call.all_in_arenas()) {
        if (call.any_is_apart()) {  // staging cuts the shares per segment, so others read what was left outside
            if (mine.is_apart != 0) call.note_largest(put_in_place(x, own));
            call.step();
        }
        all_reduce_staged(call, x, op);
    } else if (mine.is_apart != 0) {
        call.note_largest(reduce_apart(call, x, own, op));
        call.step();
    } else {
        all_reduce_direct(call, x, op);
    }
    return call.largest();
}

void SharedMemoryGroup::reduce(const Buffer& x, int root, ReduceOp op, double timeout) {
    Call call(*this, "reduce", timeout);
    bool in_mailbox = x.num_bytes() <= kMailboxBytes;
    if (in_mailbox && rank_ != root) copy(call.mailbox(rank_), x.bytes(), x.num_bytes());
    call.announce(announcement(*this, Kind::kReduce, x, op, root));
    if (size_ == 1 || x.count == 0) return;
    if (in_mailbox) {
        if (rank_ != root) return;
        return reduce_from(call, {x.data}, x.dtype, op, x.count,
                           [&](int p) { return p == rank_ ? x.bytes() : call.mailbox(p); });
    }
    if (!call.all_in_arenas()) return all_reduce_staged(call, x, op, root);
    all_reduce_direct(call, x, op, root);
}

void SharedMemoryGroup::reduce_scatter(const Buffer& out, const Buffer& x, ReduceOp op, double timeout) {
    Call call(*this, "reduce_scatter", timeout);
    bool in_mailbox = x.num_bytes() <= kMailboxBytes;
    if (in_mailbox) copy(call.mailbox(rank_), x.bytes(), x.num_bytes());
    call.announce(announcement(*this, Kind::kReduceScatter, x, op, 0));
    const int64_t width = size_of(x.dtype);
    const int64_t my_part = rank_ * out.num_bytes();
    if (in_mailbox) {
        return reduce_from(call, {out.data}, x.dtype, op, out.count, [&](int p) { return call.mailbox(p) + my_part; });
    }
    if (call.all_in_arenas()) {
        reduce_from(call, {out.data}, x.dtype, op, out.count, [&](int p) { return call.in_arena(p) + my_part; });
        return call.step();
    }
    // Segment i: for each rank its i-th piece, one after the other.
    const Segments segments{out.count, std::max<int64_t>(1, call.how_to_stage().segment_bytes / width / size_)};
    pipeline(
        call, segments.num(),
        [&](int64_t i) {
            if (call.is_in_arena(rank_)) return;
            int64_t piece = segments[i].size() * width;
            for (int p = 0; p < size_; ++p) {
                if (p == rank_) continue;
                const char* from = x.bytes() + p * out.num_bytes() + segments[i].begin * width;
                copy(call.staged_input(rank_, i) + p * piece, from, piece);
            }
        },
        [&](int64_t i) {
            const int64_t piece = segments[i].size() * width, begin = segments[i].begin * width;
            reduce_from(call, {out.bytes() + begin}, x.dtype, op, segments[i].size(), [&](int p) {
                if (p == rank_) return x.bytes() + my_part + begin;
                return call.is_in_arena(p) ? call.in_arena(p) + my_part + begin
                                           : call.staged_input(p, i) + rank_ * piece;
            });
        });
    if (call.any_in_arena()) call.step();  // the others have read
}

void SharedMemoryGroup::all_gather(const Buffer& out, const Buffer& x, double timeout) {
    Call call(*this, "all_gather", timeout);
    bool in_mailbox = x.num_bytes() <= kMailboxBytes;
    if (in_mailbox) copy(call.mailbox(rank_), x.bytes(), x.num_bytes());
    call.announce(announcement(*this, Kind::kAllGather, x, ReduceOp::kSum, 0));
    auto pull = [&](auto&& address, int64_t begin, int64_t num_bytes) {
        for (int p = 0; p < size_; ++p) {
            const char* from = p == rank_ ? x.bytes() + begin : address(p);
            copy(out.bytes() + p * x.num_bytes() + begin, from, num_bytes);
        }
    };
    if (in_mailbox) return pull([&](int p) { return call.mailbox(p); }, 0, x.num_bytes());
    if (call.all_in_arenas()) {
        pull([&](int p) { return call.in_arena(p); }, 0, x.num_bytes());
        return call.step();
    }
    const Segments segments{x.num_bytes(), call.how_to_stage().segment_bytes};
    pipeline(
        call, segments.num(),
        [&](int64_t i) {
            if (call.is_in_arena(rank_)) return;
            copy(call.staged_input(rank_, i), x.bytes() + segments[i].begin, segments[i].size());
        },
        [&](int64_t i) {
            const int64_t begin = segments[i].begin;
            auto address = [&](int p) {
                return call.is_in_arena(p) ? call.in_arena(p) + begin : call.staged_input(p, i);
            };
            pull(address, begin, segments[i].size());
        });
    if (call.any_in_arena()) call.step();  // the others have read
}

void SharedMemoryGroup::all_to_all(const Buffer& out, const Buffer& x, double timeout) {
    Call call(*this, "all_to_all", timeout);
    bool in_mailbox = x.num_bytes() <= kMailboxBytes;
    if (in_mailbox) copy(call.mailbox(rank_), x.bytes(), x.num_bytes());
    call.announce(announcement(*this, Kind::kAllToAll, x, ReduceOp::kSum, 0));
    const int64_t part = x.num_bytes() / size_;
    const int64_t my_part = rank_ * part;
    // address(p): where rank p's data for this rank lies.
    auto pull = [&](auto&& address, int64_t begin, int64_t num_bytes) {
        for (int p = 0; p < size_; ++p) {
            const char* from = p == rank_ ? x.bytes() + my_part + begin : address(p);
            copy(out.bytes() + p * part + begin, from, num_bytes);
        }
    };
    if (in_mailbox) return pull([&](int p) { return call.mailbox(p) + my_part; }, 0, part);
    if (call.all_in_arenas()) {
        pull([&](int p) { return call.in_arena(p) + my_part; }, 0, part);
        return call.step();
    }
    // Segment i: for each rank its i-th piece, one after the other.
    const Segments segments{part, std::max<int64_t>(1, call.how_to_stage().segment_bytes / size_)};
    pipeline(
        call, segments.num(),
        [&](int64_t i) {
            if (call.is_in_arena(rank_)) return;
            for (int p = 0; p < size_; ++p) {
                if (p == rank_) continue;
                const char* from = x.bytes() + p * part + segments[i].begin;
                copy(call.staged_input(rank_, i) + p * segments[i].size(), from, segments[i].size());
            }
        },
        [&](int64_t i) {
            const int64_t begin = segments[i].begin, piece = segments[i].size();
            auto address = [&](int p) {
                return call.is_in_arena(p) ? call.in_arena(p) + my_part + begin
                                           : call.staged_input(p, i) + rank_ * piece;
            };
            pull(address, begin, piece);
        });
    if (call.any_in_arena()) call.step();  // the others have read
}

void SharedMemoryGroup::broadcast(const Buffer& x, int root, double timeout) {
    Call call(*this, "broadcast", timeout);
    bool sends = rank_ == root;
    bool in_mailbox = x.num_bytes() <= kMailboxBytes;
    if (in_mailbox && sends) copy(call.mailbox(rank_), x.bytes(), x.num_bytes());
    call.announce(announcement(*this, Kind::kBroadcast, x, ReduceOp::kSum, root));
    if (in_mailbox) {
        if (!sends) copy(x.bytes(), call.mailbox(root), x.num_bytes());
        return;
    }
    if (call.announced(root).offset >= 0) {
        if (!sends) copy(x.bytes(), call.in_arena(root), x.num_bytes());
        return call.step();
    }
    const Segments segments{x.num_bytes(), call.how_to_stage().segment_bytes};
    pipeline(
        call, segments.num(),
        [&](int64_t i) {
            if (sends) copy(call.staged_input(rank_, i), x.bytes() + segments[i].begin, segments[i].size());
        },
        [&](int64_t i) {
            if (!sends) copy(x.bytes() + segments[i].begin, call.staged_input(root, i), segments[i].size());
        });
}

void SharedMemoryGroup::barrier(double timeout) {
    Call call(*this, "barrier", timeout);
    call.announce({.kind = Kind::kBarrier});
}

}  // namespace pycomm
