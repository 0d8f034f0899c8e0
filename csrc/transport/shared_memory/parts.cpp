#include "transport/shared_memory/parts.h"

#include <algorithm>

#include "kernels/absmax.h"

namespace pycomm {
namespace {

// Beyond what any machine has, and far enough from the limit that sums over all ranks do not overflow.
constexpr int64_t kMostBytes = int64_t{1} << 48;

int64_t round_up(int64_t num_bytes) { return (num_bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

// The first rank other than `rank` that gets the same array as p.
int first_of(const std::vector<Buffer>& xs, int p, int rank) {
    for (int q = 0; q < p; ++q) {
        const Buffer &one = xs[static_cast<size_t>(q)], &other = xs[static_cast<size_t>(p)];
        if (q != rank && one.data == other.data && one.num_bytes() == other.num_bytes()) return q;
    }
    return p;
}

}  // namespace

Parts::Parts(Call& call, const SharedMemoryGroup& group, const std::vector<Buffer>& xs,
             const std::vector<int64_t>& receives)
    : call_(call), xs_(xs), tables_(xs.size() * xs.size()) {
    const int rank = call.rank(), size = call.size();
    const auto table_bytes = static_cast<int64_t>(xs.size() * sizeof(Part));
    if (table_bytes > kMailboxBytes) {
        throw ArgumentError(format("%s: this group has %d ranks, wanted at most %d", call.name(), size,
                                   static_cast<int>(kMailboxBytes / static_cast<int64_t>(sizeof(Part)))));
    }
    Part* const mine = &tables_[static_cast<size_t>(rank) * xs.size()];
    int64_t small_bytes = round_up(table_bytes);
    for (int p = 0; p < size; ++p) {
        const Buffer& x = xs[static_cast<size_t>(p)];
        mine[p] = {x.num_bytes(), receives[static_cast<size_t>(p)], 0};
        if (p == rank || x.count == 0) continue;
        const int first = first_of(xs, p, rank);
        mine[p].at = ~static_cast<int64_t>(first);
        if (first == p && small_bytes <= kMailboxBytes) small_bytes += round_up(x.num_bytes());
    }
    char* const mailbox = call.mailbox(rank);
    char* next = mailbox + round_up(table_bytes);
    for (int p = 0; p < size; ++p) {
        if (mine[p].at >= 0) continue;
        const Buffer& x = xs[static_cast<size_t>(p)];
        const int64_t first = ~mine[p].at;
        if (small_bytes > kMailboxBytes) {
            const int64_t offset = group.offset_of(x);
            if (offset >= 0) mine[p].at = offset;
        } else if (first < p) {
            mine[p].at = mine[first].at;
        } else {
            copy(next, x.bytes(), x.num_bytes());
            mine[p].at = next - call.in_file(rank, 0);
            next += round_up(x.num_bytes());
        }
    }
    std::memcpy(mailbox, mine, static_cast<size_t>(table_bytes));
}

void Parts::exchange() {
    const int size = call_.size();
    for (int p = 0; p < size; ++p) {
        if (p == call_.rank()) continue;
        const size_t row = static_cast<size_t>(p) * static_cast<size_t>(size);
        std::memcpy(&tables_[row], call_.mailbox(p), static_cast<size_t>(size) * sizeof(Part));
        require_possible(p);
    }
    require_matches();
    // Rounding pieces up to whole lines takes at most two for each array.
    const int64_t room = call_.how_to_stage().segment_bytes - 2 * kCacheLine * size;
    for (int p = 0; p < size; ++p) {
        int64_t staged = 0;
        for (int q = 0; q < size; ++q) {
            if (is_first(p, q)) staged += part(p, q).sends;
            any_in_arena_ = any_in_arena_ || part(p, q).at >= header_bytes(size);
        }
        num_segments_ = std::max(num_segments_, (staged + room - 1) / room);
    }
}

void Parts::require_possible(int p) const {
    for (int q = 0; q < call_.size(); ++q) {
        const Part& row = part(p, q);
        bool possible = row.sends >= 0 && row.sends <= kMostBytes && row.receives >= 0;
        if (q == p || row.sends == 0) {
            possible = possible && row.at == 0;
        } else if (row.at >= 0) {
            possible = possible && call_.may_hold_array(row.at, row.sends);
        } else {
            const int64_t first = ~row.at;
            possible = possible && first <= q && first != p && is_first(p, static_cast<int>(first)) &&
                       part(p, static_cast<int>(first)).sends == row.sends;
        }
        if (!possible) call_.distrust(p);
    }
}

void Parts::require_matches() const {
    for (int p = 0; p < call_.size(); ++p) {
        for (int q = 0; q < call_.size(); ++q) {
            if (part(p, q).sends == part(q, p).receives) continue;
            throw ArgumentError(format("%s: rank %d has %lld bytes for rank %d, which expects %lld", call_.name(), p,
                                       static_cast<long long>(part(p, q).sends), q,
                                       static_cast<long long>(part(q, p).receives)));
        }
    }
}

int64_t Parts::pitch(int64_t num_bytes) const {
    return num_segments_ == 0 ? num_bytes : round_up((num_bytes + num_segments_ - 1) / num_segments_);
}

Range Parts::piece_of_bytes(int64_t num_bytes, int64_t i) const {
    const int64_t step = pitch(num_bytes);
    return {std::min(num_bytes, i * step), std::min(num_bytes, (i + 1) * step)};
}

const char* Parts::address(int p, int64_t i) const {
    const int rank = call_.rank();
    const Part& row = part(p, rank);
    const int64_t begin = piece(p, i).begin;
    if (p == rank) return xs_[static_cast<size_t>(rank)].bytes() + begin;
    if (row.at >= 0) return call_.in_file(p, row.at) + begin;
    const char* from = call_.staged_input(p, i);
    for (int q = 0; q < ~row.at; ++q) {
        if (is_first(p, q)) from += pitch(part(p, q).sends);
    }
    return from;
}

void Parts::stage(int64_t i) const {
    const int rank = call_.rank();
    char* to = call_.staged_input(rank, i);
    for (int q = 0; q < call_.size(); ++q) {
        if (!is_first(rank, q)) continue;
        const Range range = piece_of_bytes(part(rank, q).sends, i);
        copy(to, xs_[static_cast<size_t>(q)].bytes() + range.begin, range.size());
        to += pitch(part(rank, q).sends);
    }
}

void SharedMemoryGroup::all_to_all_v(const std::vector<Buffer>& outs, const std::vector<Buffer>& xs, double timeout) {
    Call call(*this, "all_to_all_v", timeout);
    std::vector<int64_t> receives;
    for (const Buffer& out : outs) receives.push_back(out.num_bytes());
    Parts parts(call, *this, xs, receives);
    call.announce({.kind = Kind::kAllToAllV});
    parts.exchange();
    parts.move([&](int64_t i) {
        for (int p = 0; p < size_; ++p) {
            const Range range = parts.piece(p, i);
            if (range.size() == 0) continue;
            copy(outs[static_cast<size_t>(p)].bytes() + range.begin, parts.address(p, i), range.size());
        }
    });
}

void SharedMemoryGroup::reduce_scatter_v(const Buffer& out, const std::vector<Buffer>& xs, ReduceOp op,
                                         double timeout) {
    reduce_scatter_apart(out, xs, op, timeout, {});
}

float SharedMemoryGroup::reduce_scatter_apart(const Buffer& out, const std::vector<Buffer>& xs, ReduceOp op,
                                              double timeout, const std::vector<Buffer>& pieces) {
    Call call(*this, "reduce_scatter_v", timeout);
    Parts parts(call, *this, xs, std::vector<int64_t>(xs.size(), out.num_bytes()));
    call.announce({.kind = Kind::kReduceScatterV, .dtype = out.dtype, .op = op});
    parts.exchange();
    const bool is_apart = !pieces.empty();
    const std::vector<Buffer> own = is_apart ? pieces : std::vector<Buffer>{xs[static_cast<size_t>(rank_)]};
    float largest = 0.0f;
    parts.move([&](int64_t i) {
        const Range range = parts.piece(rank_, i);  // the same for every rank
        for_blocks_of(own, range, [&](const Buffer& block, int64_t offset) {
            char* const to = out.bytes() + offset;
            const bool is_checked = is_apart && block.data != to;
            if (is_checked) largest = larger(largest, absmax({block}, 1));
            reduce_from(
                call, {to}, out.dtype, op, block.count,
                [&](int p) { return p == rank_ ? block.bytes() : parts.address(p, i) + (offset - range.begin); },
                is_checked ? 1 : 0);
        });
    });
    return largest;
}

}  // namespace pycomm
