// Collectives of TcpGroup, written with the methods of TcpCall. See group.h for how each moves.

#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels/reduce.h"
#include "transport/tcp/call.h"
#include "transport/tcp/run.h"

namespace pycomm {
namespace {

constexpr int64_t kOneRoundBytes = 64 << 10;  // of an array, and ...
constexpr int64_t kOneRoundSent = 128 << 10;  // ... that a rank sends to all others together
constexpr int64_t kStageBytes = 256 << 10;    // pieces of all ranks, which are added while they are in the cache
constexpr int64_t kLeastPiece = 16 << 10, kMostPiece = 128 << 10;
constexpr int64_t kRelayPiece = 256 << 10;
constexpr int64_t kPartAlign = 64;  // elements
// Up to here every rank sends to every other one. Beyond, a ring sends as many bytes, and keeps a slow link busier: 3
// to 8 % at 1 Gbit/s, as the flows of several ranks to one do not all end at the same time.
constexpr int64_t kTwoRoundsBytes = 1 << 20;

Range share_of(int64_t count, int index, int size) { return piece_of(count, index, size, kPartAlign); }

std::vector<int> all_ranks(int size) {
    std::vector<int> out(static_cast<size_t>(size));
    std::iota(out.begin(), out.end(), 0);
    return out;
}

void copy_apart(void* to, const void* from, int64_t num_bytes) {
    if (to != from && num_bytes > 0) std::memcpy(to, from, static_cast<size_t>(num_bytes));
}

// Reduces `count` elements of this rank's `own` and those that every other member sends, in rank order, into `out`,
// which may be `own`. Calls on_piece(address, bytes) for each piece of the result.
template <class OnPiece>
void reduce_pieces(TcpCall& call, const char* own, char* out, int64_t count, DType dtype, ReduceOp op,
                   OnPiece&& on_piece) {
    const int64_t width = size_of(dtype);
    const auto num_peers = static_cast<int64_t>(call.peers().size());
    const int64_t piece = std::clamp(kStageBytes / std::max<int64_t>(1, num_peers), kLeastPiece, kMostPiece) / width;
    char* const stage = call.scratch(piece * width * num_peers);
    std::vector<const void*> inputs(call.members().size());
    for (int64_t at = 0; at < count; at += piece) {
        const int64_t length = std::min(piece, count - at);
        for (int64_t k = 0; k < num_peers; ++k) {
            const int p = call.peers()[static_cast<size_t>(k)];
            char* const to = stage + k * piece * width;
            call.link(p).receive(to, length * width);
            const auto place = (static_cast<size_t>(call.index()) + 1 + static_cast<size_t>(k)) % inputs.size();
            inputs[place] = to;
        }
        inputs[static_cast<size_t>(call.index())] = own + at * width;
        call.receive_all();
        void* const to = out + at * width;
        reduce_range(&to, 1, inputs.data(), static_cast<int>(inputs.size()), dtype, op, length);
        on_piece(out + at * width, length * width);
    }
}

void no_more(const char*, int64_t) {}

void all_reduce_in_one_round(TcpCall& call, const Operation& operation, const Buffer& x, ReduceOp op) {
    const int64_t num_bytes = x.num_bytes();
    for (int p : call.peers()) call.attach(p, x.data, num_bytes);
    call.begin(operation);
    char* stage = call.scratch(num_bytes * static_cast<int64_t>(call.peers().size()));
    std::vector<const void*> inputs(call.members().size());
    for (size_t k = 0; k < call.peers().size(); ++k) {
        char* const to = stage + static_cast<int64_t>(k) * num_bytes;
        call.link(call.peers()[k]).receive(to, num_bytes);
        inputs[(static_cast<size_t>(call.index()) + 1 + k) % inputs.size()] = to;
    }
    inputs[static_cast<size_t>(call.index())] = x.data;
    call.finish();
    void* const to = x.data;
    reduce_range(&to, 1, inputs.data(), static_cast<int>(inputs.size()), x.dtype, op, x.count);
}

void all_reduce_in_two_rounds(TcpCall& call, const Operation& operation, const Buffer& x, ReduceOp op) {
    const int64_t width = size_of(x.dtype);
    const int size = call.num_members();
    auto part = [&](int p) {
        const auto index = std::find(call.members().begin(), call.members().end(), p) - call.members().begin();
        return share_of(x.count, static_cast<int>(index), size);
    };
    for (int p : call.peers()) call.attach(p, x.bytes() + part(p).begin * width, part(p).size() * width);
    call.begin(operation);
    const Range mine = part(call.rank());
    char* const own = x.bytes() + mine.begin * width;
    reduce_pieces(call, own, own, mine.size(), x.dtype, op, [&](const char* piece, int64_t num_bytes) {
        for (int p : call.peers()) call.link(p).send(piece, num_bytes);
    });
    // A rank sends its results only once it has what this one had to say about them.
    for (int p : call.peers()) call.link(p).receive(x.bytes() + part(p).begin * width, part(p).size() * width);
    call.finish();
}

// A program of a ring: chunk c is reduced along the ranks from c + 1 on, then copied along them.
Program ring_of(int index, int size, const std::vector<int>& members) {
    Program program{index, size, size, {}, {}};
    const int next = members[static_cast<size_t>((index + 1) % size)];
    const int before = members[static_cast<size_t>((index + size - 1) % size)];
    for (int step = 0; step < 2 * (size - 1); ++step) {
        const bool reduces = step < size - 1;
        const int shift = reduces ? 0 : 1, round = reduces ? step : step - (size - 1);
        const int64_t sent = (index + shift - round + 2 * size) % size;
        const int64_t received = (index + shift - round - 1 + 2 * size) % size;
        program.sends.push_back({next, sent, 1, false, true, step, 0});
        // The chunk that is received was sent `size` steps ago, if at all.
        program.receives.push_back({before, received, 1, reduces, false, 0, std::max(0, step - size + 2)});
    }
    return program;
}

void all_reduce_with(TcpCall& call, const Buffer& x, ReduceOp op) {
    const Operation operation{.kind = Kind::kAllReduce, .dtype = x.dtype, .op = op, .tag = x.tag, .count = x.count};
    const auto num_peers = static_cast<int64_t>(call.peers().size());
    if (num_peers == 0) return;
    const int64_t num_bytes = x.num_bytes();
    if (num_bytes <= kOneRoundBytes && num_bytes * num_peers <= kOneRoundSent) {
        return all_reduce_in_one_round(call, operation, x, op);
    }
    // Along a ring half types would be rounded at every rank.
    if (num_peers == 1 || num_bytes <= kTwoRoundsBytes || size_of(x.dtype) == 2) {
        return all_reduce_in_two_rounds(call, operation, x, op);
    }
    call.begin(operation);
    run_over_tcp(call, ring_of(call.index(), call.num_members(), call.members()), x, op);
}

void broadcast_with(TcpCall& call, const Buffer& x, int root) {
    const Operation operation{.kind = Kind::kBroadcast, .dtype = x.dtype, .tag = x.tag, .root = root, .count = x.count};
    const int64_t num_bytes = x.num_bytes();
    const bool sends = call.rank() == root;
    if (num_bytes <= kOneRoundBytes || call.num_members() == 2) {
        if (sends) {
            for (int p : call.peers()) call.attach(p, x.data, num_bytes);
        }
        call.begin(operation);
        if (!sends) call.link(root).receive(x.data, num_bytes);
        return call.finish();
    }
    // The root sends each of the others its part, and each passes it on to the rest as it comes: the root's link
    // carries every byte once.
    std::vector<int> others;
    for (int p : call.members()) {
        if (p != root) others.push_back(p);
    }
    auto part = [&](int p) {
        const auto index = std::find(others.begin(), others.end(), p) - others.begin();
        return piece_of(num_bytes, static_cast<int>(index), static_cast<int>(others.size()), kPartAlign);
    };
    if (sends) {
        for (int p : call.peers()) call.attach(p, x.bytes() + part(p).begin, part(p).size());
    }
    call.begin(operation);
    if (sends) return call.finish();
    for (int p : others) {
        if (p != call.rank()) call.link(p).receive(x.bytes() + part(p).begin, part(p).size());
    }
    const Range mine = part(call.rank());
    for (int64_t at = mine.begin; at < mine.end; at += kRelayPiece) {
        const int64_t length = std::min(kRelayPiece, mine.end - at);
        call.link(root).receive(x.bytes() + at, length);
        while (call.link(root).is_receiving()) call.move();
        for (int p : others) {
            if (p != call.rank()) call.link(p).send(x.bytes() + at, length);
        }
    }
    call.finish();
}

// The bytes that this rank sends to each other one, and those that it expects.
std::vector<int64_t> table_of(const std::vector<Buffer>& xs, const std::vector<int64_t>& receives) {
    std::vector<int64_t> table;
    for (const Buffer& x : xs) table.push_back(x.num_bytes());
    table.insert(table.end(), receives.begin(), receives.end());
    return table;
}

// Exchanges frames with the table. If two ranks disagree on a length, throws ArgumentError on every rank, naming the
// first such pair.
void begin_with_table(TcpCall& call, const Operation& operation, const std::vector<int64_t>& table) {
    const auto size = table.size() / 2;
    const auto table_bytes = table.size() * sizeof(int64_t);
    call.begin(operation, table.data(), static_cast<uint32_t>(table_bytes), [&] {
        std::vector<std::vector<int64_t>> tables(size);
        for (size_t p = 0; p < size; ++p) {
            tables[p] = table;
            if (static_cast<int>(p) == call.rank()) continue;
            const std::vector<char>& theirs = call.extra_of(static_cast<int>(p));
            if (theirs.size() != table_bytes) call.distrust(static_cast<int>(p), "an impossible table of lengths");
            std::memcpy(tables[p].data(), theirs.data(), table_bytes);
        }
        for (size_t p = 0; p < size; ++p) {
            for (size_t q = 0; q < size; ++q) {
                if (tables[p][q] == tables[q][size + p]) continue;
                throw ArgumentError(format("%s: rank %zu has %lld bytes for rank %zu, which expects %lld", call.name(),
                                           p, static_cast<long long>(tables[p][q]), q,
                                           static_cast<long long>(tables[q][size + p])));
            }
        }
    });
}

}  // namespace

void TcpGroup::all_reduce(const Buffer& x, ReduceOp op, double timeout) {
    TcpCall call(*this, "all_reduce", timeout, all_ranks(size_));
    all_reduce_with(call, x, op);
}

void TcpGroup::all_reduce_among(const std::vector<int>& members, const Buffer& x, ReduceOp op, double timeout) {
    TcpCall call(*this, "all_reduce", timeout, members);
    all_reduce_with(call, x, op);
}

void TcpGroup::broadcast(const Buffer& x, int root, double timeout) {
    TcpCall call(*this, "broadcast", timeout, all_ranks(size_));
    broadcast_with(call, x, root);
}

void TcpGroup::broadcast_among(const std::vector<int>& members, const Buffer& x, int root, double timeout) {
    TcpCall call(*this, "broadcast", timeout, members);
    if (members.size() > 1) broadcast_with(call, x, root);
}

void TcpGroup::compare(const Operation& operation, double timeout) {
    TcpCall call(*this, "compare", timeout, all_ranks(size_));
    call.begin(operation);
    call.finish();
}

void TcpGroup::compare_parts(const char* name, const Operation& operation, const std::vector<int64_t>& sends,
                             const std::vector<int64_t>& receives, double timeout) {
    if (sends.size() != static_cast<size_t>(size_) || receives.size() != sends.size()) {
        throw ArgumentError("sends and receives require one number for each rank");
    }
    TcpCall call(*this, name, timeout, all_ranks(size_));
    std::vector<int64_t> table = sends;
    table.insert(table.end(), receives.begin(), receives.end());
    begin_with_table(call, operation, table);
    call.finish();
}

void TcpGroup::barrier(double timeout) {
    TcpCall call(*this, "barrier", timeout, all_ranks(size_));
    call.begin({.kind = Kind::kBarrier});
    call.finish();
}

void TcpGroup::reduce(const Buffer& x, int root, ReduceOp op, double timeout) {
    TcpCall call(*this, "reduce", timeout, all_ranks(size_));
    const Operation operation{
        .kind = Kind::kReduce, .dtype = x.dtype, .op = op, .tag = x.tag, .root = root, .count = x.count};
    const bool is_root = rank_ == root;
    const int64_t width = size_of(x.dtype);
    // Small: the root adds all of it. Else each rank adds its part, and sends the result to the root.
    const bool is_small = x.num_bytes() <= kOneRoundBytes;
    auto part = [&](int p) {
        if (is_small) return p == root ? Range{0, x.count} : Range{0, 0};
        return share_of(x.count, p, size_);
    };
    for (int p : call.peers()) call.attach(p, x.bytes() + part(p).begin * width, part(p).size() * width);
    call.begin(operation);
    const Range mine = part(rank_);
    const char* const own = x.bytes() + mine.begin * width;
    std::vector<char> result(is_root ? 0 : static_cast<size_t>(mine.size() * width));
    char* const out = is_root ? x.bytes() + mine.begin * width : result.data();
    reduce_pieces(call, own, out, mine.size(), x.dtype, op, [&](const char* piece, int64_t num_bytes) {
        if (!is_root) call.link(root).send(piece, num_bytes);
    });
    if (is_root && !is_small) {
        for (int p : call.peers()) call.link(p).receive(x.bytes() + part(p).begin * width, part(p).size() * width);
    }
    call.finish();
}

void TcpGroup::reduce_scatter(const Buffer& out, const Buffer& x, ReduceOp op, double timeout) {
    TcpCall call(*this, "reduce_scatter", timeout, all_ranks(size_));
    const int64_t part = out.num_bytes();
    for (int p : call.peers()) call.attach(p, x.bytes() + p * part, part);
    call.begin({.kind = Kind::kReduceScatter, .dtype = x.dtype, .op = op, .tag = x.tag, .count = x.count});
    reduce_pieces(call, x.bytes() + rank_ * part, out.bytes(), out.count, x.dtype, op, no_more);
    call.finish();
}

void TcpGroup::all_gather(const Buffer& out, const Buffer& x, double timeout) {
    TcpCall call(*this, "all_gather", timeout, all_ranks(size_));
    const int64_t part = x.num_bytes();
    for (int p : call.peers()) call.attach(p, x.data, part);
    call.begin({.kind = Kind::kAllGather, .dtype = x.dtype, .tag = x.tag, .count = x.count});
    for (int p : call.peers()) call.link(p).receive(out.bytes() + p * part, part);
    copy_apart(out.bytes() + rank_ * part, x.data, part);
    call.finish();
}

void TcpGroup::all_to_all(const Buffer& out, const Buffer& x, double timeout) {
    TcpCall call(*this, "all_to_all", timeout, all_ranks(size_));
    const int64_t part = x.num_bytes() / size_;
    for (int p : call.peers()) call.attach(p, x.bytes() + p * part, part);
    call.begin({.kind = Kind::kAllToAll, .dtype = x.dtype, .tag = x.tag, .count = x.count});
    for (int p : call.peers()) call.link(p).receive(out.bytes() + p * part, part);
    copy_apart(out.bytes() + rank_ * part, x.bytes() + rank_ * part, part);
    call.finish();
}

void TcpGroup::all_to_all_v(const std::vector<Buffer>& outs, const std::vector<Buffer>& xs, double timeout) {
    TcpCall call(*this, "all_to_all_v", timeout, all_ranks(size_));
    std::vector<int64_t> receives;
    for (const Buffer& out : outs) receives.push_back(out.num_bytes());
    const std::vector<int64_t> table = table_of(xs, receives);
    for (int p : call.peers()) {
        const Buffer& x = xs[static_cast<size_t>(p)];
        call.attach(p, x.data, x.num_bytes());
    }
    begin_with_table(call, {.kind = Kind::kAllToAllV}, table);
    for (int p : call.peers()) {
        const Buffer& out = outs[static_cast<size_t>(p)];
        call.link(p).receive(out.data, out.num_bytes());
    }
    const auto own = static_cast<size_t>(rank_);
    copy_apart(outs[own].data, xs[own].data, outs[own].num_bytes());
    call.finish();
}

void TcpGroup::reduce_scatter_v(const Buffer& out, const std::vector<Buffer>& xs, ReduceOp op, double timeout) {
    TcpCall call(*this, "reduce_scatter_v", timeout, all_ranks(size_));
    const std::vector<int64_t> table = table_of(xs, std::vector<int64_t>(xs.size(), out.num_bytes()));
    for (int p : call.peers()) {
        const Buffer& x = xs[static_cast<size_t>(p)];
        call.attach(p, x.data, x.num_bytes());
    }
    begin_with_table(call, {.kind = Kind::kReduceScatterV, .dtype = out.dtype, .op = op}, table);
    reduce_pieces(call, xs[static_cast<size_t>(rank_)].bytes(), out.bytes(), out.count, out.dtype, op, no_more);
    call.finish();
}

}  // namespace pycomm
