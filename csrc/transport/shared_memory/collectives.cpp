// Collectives of SharedMemoryGroup, written with the methods of Call. See group.h for how each moves.

#include <algorithm>

#include "transport/shared_memory/moves.h"

namespace pycomm {
namespace {

// Inner borders between parts: whole cache lines of every type, so that two ranks never write one line.
constexpr int64_t kPartAlign = 64;
// Up to here every rank reduces everything by itself: reading P times as much beats one more step.
constexpr int64_t kRedundantBytes = 16 << 10;

Range part_of(int64_t count, int p, int size) { return piece_of(count, p, size, kPartAlign); }

struct Segments {
    int64_t count, max_elements;
    int64_t num() const { return (count + max_elements - 1) / max_elements; }
    Range operator[](int64_t i) const { return {i * max_elements, std::min(count, (i + 1) * max_elements)}; }
};

void all_reduce_mailbox(Call& call, const Buffer& x, ReduceOp op) {
    if (x.num_bytes() <= kRedundantBytes) {
        return reduce_from(call, {x.data}, x.dtype, op, x.count, [&](int p) { return call.mailbox(p); });
    }
    int64_t width = size_of(x.dtype);
    Range mine = part_of(x.count, call.rank(), call.size());
    int64_t offset = mine.begin * width;
    reduce_from(call, {x.bytes() + offset, call.staged_result(call.rank(), 0) + offset}, x.dtype, op, mine.size(),
                [&](int p) { return call.mailbox(p) + offset; });
    call.step();
    for (int p = 0; p < call.size(); ++p) {
        Range part = part_of(x.count, p, call.size());
        if (p != call.rank()) {
            copy(x.bytes() + part.begin * width, call.staged_result(p, 0) + part.begin * width, part.size() * width);
        }
    }
}

void all_reduce_direct(Call& call, const Buffer& x, ReduceOp op) {
    Range mine = part_of(x.count, call.rank(), call.size());
    int64_t offset = mine.begin * size_of(x.dtype);
    std::vector<void*> outs;
    for (int p = 0; p < call.size(); ++p) outs.push_back(call.in_arena(p) + offset);
    reduce_from(call, outs, x.dtype, op, mine.size(), [&](int p) { return call.in_arena(p) + offset; });
    call.step();
}

// The result goes to every rank, or to one. Where it goes to one, all work on it, and x is left as it is elsewhere.
constexpr int kEveryRank = -1;

void all_reduce_staged(Call& call, const Buffer& x, ReduceOp op, int root = kEveryRank) {
    const bool receives = root == kEveryRank || root == call.rank();
    const int64_t width = size_of(x.dtype);
    const Segments segments{x.count, kSegmentBytes / width};
    auto part = [&](int64_t segment, int p) { return part_of(segments[segment].size(), p, call.size()); };
    auto own = [&](int64_t segment) { return x.bytes() + segments[segment].begin * width; };

    auto stage = [&](int64_t i) {  // all but the part that this rank reduces itself
        Range mine = part(i, call.rank());
        char* to = call.staged_input(call.rank(), i);
        copy(to, own(i), mine.begin * width);
        copy(to + mine.end * width, own(i) + mine.end * width, (segments[i].size() - mine.end) * width);
    };
    auto reduce_part = [&](int64_t i) {
        Range mine = part(i, call.rank());
        int64_t offset = mine.begin * width;
        std::vector<void*> outs;
        if (receives) outs.push_back(own(i) + offset);
        if (root != call.rank()) outs.push_back(call.staged_result(call.rank(), i) + offset);
        reduce_from(call, outs, x.dtype, op, mine.size(),
                    [&](int p) { return (p == call.rank() ? own(i) : call.staged_input(p, i)) + offset; });
    };
    auto fetch = [&](int64_t i) {
        for (int p = 0; p < call.size(); ++p) {
            Range theirs = part(i, p);
            int64_t offset = theirs.begin * width;
            if (p != call.rank()) copy(own(i) + offset, call.staged_result(p, i) + offset, theirs.size() * width);
        }
    };
    pipeline(
        call, segments.num() + 1,
        [&](int64_t i) {
            if (i < segments.num()) stage(i);
            if (i > 0) reduce_part(i - 1);
        },
        [&](int64_t i) {
            if (i > 0 && receives) fetch(i - 1);
        });
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
    Call call(*this, "all_reduce", timeout);
    bool in_mailbox = x.num_bytes() <= kMailboxBytes;
    if (in_mailbox) copy(call.mailbox(rank_), x.bytes(), x.num_bytes());
    call.announce(announcement(*this, Kind::kAllReduce, x, op, 0));
    if (size_ == 1 || x.count == 0) return;
    if (in_mailbox) return all_reduce_mailbox(call, x, op);
    if (call.all_in_arenas()) return all_reduce_direct(call, x, op);
    all_reduce_staged(call, x, op);
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
    Range mine = part_of(x.count, rank_, size_);
    const int64_t offset = mine.begin * size_of(x.dtype);
    reduce_from(call, {call.in_arena(root) + offset}, x.dtype, op, mine.size(),
                [&](int p) { return call.in_arena(p) + offset; });
    call.step();
}

void SharedMemoryGroup::reduce_scatter(const Buffer& out, const Buffer& x, ReduceOp op, double timeout) {
    Call call(*this, "reduce_scatter", timeout);
    call.announce(announcement(*this, Kind::kReduceScatter, x, op, 0));
    const int64_t width = size_of(x.dtype);
    const int64_t my_part = rank_ * out.num_bytes();
    if (call.all_in_arenas()) {
        reduce_from(call, {out.data}, x.dtype, op, out.count, [&](int p) { return call.in_arena(p) + my_part; });
        return call.step();
    }
    // Segment i: for each rank its i-th piece, one after the other.
    const Segments segments{out.count, std::max<int64_t>(1, kSegmentBytes / width / size_)};
    pipeline(
        call, segments.num(),
        [&](int64_t i) {
            int64_t piece = segments[i].size() * width;
            for (int p = 0; p < size_; ++p) {
                const char* from = x.bytes() + p * out.num_bytes() + segments[i].begin * width;
                copy(call.staged_input(rank_, i) + p * piece, from, piece);
            }
        },
        [&](int64_t i) {
            int64_t piece = segments[i].size() * width;
            reduce_from(call, {out.bytes() + segments[i].begin * width}, x.dtype, op, segments[i].size(),
                        [&](int p) { return call.staged_input(p, i) + rank_ * piece; });
        });
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
    const Segments segments{x.num_bytes(), kSegmentBytes};
    pipeline(
        call, segments.num(),
        [&](int64_t i) { copy(call.staged_input(rank_, i), x.bytes() + segments[i].begin, segments[i].size()); },
        [&](int64_t i) {
            pull([&](int p) { return call.staged_input(p, i); }, segments[i].begin, segments[i].size());
        });
}

void SharedMemoryGroup::all_to_all(const Buffer& out, const Buffer& x, double timeout) {
    Call call(*this, "all_to_all", timeout);
    bool in_mailbox = x.num_bytes() <= kMailboxBytes;
    if (in_mailbox) copy(call.mailbox(rank_), x.bytes(), x.num_bytes());
    call.announce(announcement(*this, Kind::kAllToAll, x, ReduceOp::kSum, 0));
    const int64_t part = x.num_bytes() / size_;
    // For me, out of what rank p has at address(p), where every rank's piece is `pitch` bytes behind the last one's.
    auto pull = [&](auto&& address, int64_t pitch, int64_t begin, int64_t num_bytes) {
        for (int p = 0; p < size_; ++p) {
            const char* from = p == rank_ ? x.bytes() + rank_ * part + begin : address(p) + rank_ * pitch;
            copy(out.bytes() + p * part + begin, from, num_bytes);
        }
    };
    if (in_mailbox) return pull([&](int p) { return call.mailbox(p); }, part, 0, part);
    if (call.all_in_arenas()) {
        pull([&](int p) { return call.in_arena(p); }, part, 0, part);
        return call.step();
    }
    // Segment i: for each rank its i-th piece, one after the other.
    const Segments segments{part, std::max<int64_t>(1, kSegmentBytes / size_)};
    pipeline(
        call, segments.num(),
        [&](int64_t i) {
            for (int p = 0; p < size_; ++p) {
                const char* from = x.bytes() + p * part + segments[i].begin;
                copy(call.staged_input(rank_, i) + p * segments[i].size(), from, segments[i].size());
            }
        },
        [&](int64_t i) {
            pull([&](int p) { return call.staged_input(p, i); }, segments[i].size(), segments[i].begin,
                 segments[i].size());
        });
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
    const Segments segments{x.num_bytes(), kSegmentBytes};
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
