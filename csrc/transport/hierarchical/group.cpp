#include "transport/hierarchical/group.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>

#include "base/error.h"
#include "base/parallel.h"
#include "kernels/reduce.h"
#include "transport/convert.h"
#include "transport/hierarchical/background.h"

namespace pycomm {
namespace {

constexpr int64_t kFlatBytes = 1 << 10;      // up to here one round between all ranks is faster than three steps
constexpr int64_t kOneLaneBytes = 32 << 10;  // up to here several lanes do not pay off
constexpr int64_t kSegmentBytes = 4 << 20;
constexpr int64_t kBorderAlign = 64;  // elements
// Waits within a host are longer than waits between hosts, so that the rank that waits for another host fails first.
constexpr double kLocalPatience = 2.0, kLocalGrace = 5.0;
constexpr double kStoppedPatience = 0.8;  // of the timeout

// The sum of halves may not fit a half although the mean does.
bool widens(const Buffer& x, ReduceOp op) { return op == ReduceOp::kMean && size_of(x.dtype) == 2; }

ReduceOp without_mean(ReduceOp op) { return op == ReduceOp::kMean ? ReduceOp::kSum : op; }

Buffer slice(const Buffer& x, Range range) {
    return {x.bytes() + range.begin * size_of(x.dtype), range.size(), x.dtype};
}

std::vector<Buffer> equal_parts(const Buffer& x, int count) {
    std::vector<Buffer> parts;
    const int64_t each = x.count / count;
    for (int p = 0; p < count; ++p) parts.push_back(slice(x, {p * each, (p + 1) * each}));
    return parts;
}

// A copy of some arrays, one after the other; the arrays themselves if they are adjacent.
class Joined {
   public:
    Joined(const std::vector<Buffer>& arrays, const std::vector<int>& which, DType dtype) : whole_{nullptr, 0, dtype} {
        bool is_one = true;
        for (int p : which) {
            const Buffer& each = arrays[static_cast<size_t>(p)];
            if (each.count == 0) continue;
            is_one = is_one && (whole_.count == 0 || whole_.bytes() + whole_.num_bytes() == each.bytes());
            if (whole_.count == 0) whole_.data = each.data;
            whole_.count += each.count;
        }
        if (is_one) return;
        copy_.resize(static_cast<size_t>(whole_.num_bytes()));
        whole_.data = copy_.data();
    }

    const Buffer& whole() const { return whole_; }
    bool is_copy() const { return !copy_.empty(); }
    // The place of arrays[which[i]] for each i.
    std::vector<Buffer> places(const std::vector<Buffer>& arrays, const std::vector<int>& which) const {
        std::vector<Buffer> out;
        int64_t at = 0;
        for (int p : which) {
            const int64_t count = arrays[static_cast<size_t>(p)].count;
            out.push_back(slice(whole_, {at, at + count}));
            at += count;
        }
        return out;
    }

   private:
    Buffer whole_;
    std::vector<char> copy_;
};

void copy_apart(const Buffer& to, const Buffer& from) {
    if (to.data != from.data && to.count > 0) std::memcpy(to.data, from.data, static_cast<size_t>(to.num_bytes()));
}

}  // namespace

HierarchicalGroup::HierarchicalGroup(TcpGroup& flat, SharedMemoryGroup& local, std::vector<std::vector<int>> hosts,
                                     std::function<void()> check_signals)
    : flat_(flat), local_(local), hosts_(std::move(hosts)), check_signals_(std::move(check_signals)) {
    size_t most = 0, fewest = hosts_.empty() ? 0 : hosts_[0].size();
    std::vector<int> everyone, all(static_cast<size_t>(size()));
    std::iota(all.begin(), all.end(), 0);
    for (size_t host = 0; host < hosts_.size(); ++host) {
        most = std::max(most, hosts_[host].size());
        fewest = std::min(fewest, hosts_[host].size());
        const std::vector<int>& members = hosts_[host];
        everyone.insert(everyone.end(), members.begin(), members.end());
        if (std::find(members.begin(), members.end(), rank()) != members.end()) host_ = host;
    }
    std::sort(everyone.begin(), everyone.end());
    const bool fits = everyone == all && fewest > 0 && hosts_[host_].size() == static_cast<size_t>(local.size()) &&
                      hosts_[host_][static_cast<size_t>(local.rank())] == rank();
    if (!fits) throw ArgumentError("hosts do not match the two groups");
    num_lanes_ = static_cast<int>(fewest);
    const auto own = static_cast<size_t>(local.rank());
    if (local.rank() >= num_lanes_) lane_ = {rank()};
    carried_.resize(hosts_[host_].size());
    for (size_t host = 0; host < hosts_.size(); ++host) {
        const std::vector<int>& members = hosts_[host];
        if (local.rank() < num_lanes_) lane_.push_back(members[own]);
        if (host != host_) carriers_.push_back(members[own % members.size()]);
    }
    std::sort(lane_.begin(), lane_.end());
    for (size_t index = 0; index < most; ++index) {
        for (const std::vector<int>& members : hosts_) {
            if (index < members.size()) carried_[index % carried_.size()].push_back(members[index]);
        }
    }
}

// A failure of an operation in shared memory, or over TCP, is one of both.
template <class Run>
void HierarchicalGroup::whole(Run&& operation) {
    try {
        operation();
    } catch (const CommFailure& error) {
        // A rank of this host may have ended because another host's did: it has told all ranks so, before it ended.
        const int peer = error.peer >= 0 && is_here(error.peer) ? flat_.cause_of_end(error.peer) : error.peer;
        flat_.give_up(peer, error.what());
        local_.close(error.what());
        if (peer == error.peer) throw;
        throw CommFailure(error.rank, peer, error.operation, error.elapsed, error.what());
    }
}

void HierarchicalGroup::close(const std::string& why) {
    flat_.close(why);
    local_.close(why);
}

bool HierarchicalGroup::is_here(int p) const {
    return std::find(hosts_[host_].begin(), hosts_[host_].end(), p) != hosts_[host_].end();
}

void HierarchicalGroup::compare(const Operation& operation, double timeout) {
    if (skip_ == Skip::kAll) return;
    flat_.compare(operation, timeout);
    if (skip_ == Skip::kAfterTheNext) skip_ = Skip::kAll;
}

void HierarchicalGroup::compare_parts(const char* name, const Operation& operation, const std::vector<Buffer>& sends,
                                      const std::vector<Buffer>& receives, double timeout) {
    if (skip_ == Skip::kAll) return;
    auto lengths = [](const std::vector<Buffer>& of) {
        std::vector<int64_t> out;
        for (const Buffer& each : of) out.push_back(each.num_bytes());
        return out;
    };
    flat_.compare_parts(name, operation, lengths(sends), lengths(receives), timeout);
    if (skip_ == Skip::kAfterTheNext) skip_ = Skip::kAll;
}

// The limit of waits within a host. A process that is stopped there is named before other hosts' waits for this rank
// end.
double HierarchicalGroup::local_patience(double timeout) {
    local_.give_up_stopped_after(std::min(stopped_patience_.load(), kStoppedPatience * timeout));
    return kLocalPatience * timeout + kLocalGrace;
}

void HierarchicalGroup::all_reduce(const Buffer& x, ReduceOp op, double timeout) {
    if (x.num_bytes() <= kFlatBytes) return flat_.all_reduce(x, op, timeout);
    whole([&] {
        compare({.kind = Kind::kAllReduce, .dtype = x.dtype, .op = op, .tag = x.tag, .count = x.count}, timeout);
        if (!widens(x, op)) return all_reduce_segments(x, op, timeout);
        std::vector<float> wide(static_cast<size_t>(x.count));
        const Buffer array{wide.data(), x.count, DType::kF32};
        convert(array, x, 1.0);
        all_reduce_segments(array, op, timeout);
        convert(x, array, 1.0);
    });
}

void HierarchicalGroup::all_reduce_segments(const Buffer& x, ReduceOp op, double timeout) {
    const ReduceOp sum = without_mean(op);
    const double patience = local_patience(timeout);
    const int lanes = x.num_bytes() <= kOneLaneBytes ? 1 : num_lanes_;
    const bool has_part = local_.rank() < lanes;
    const bool is_even = lanes == local_.size();  // else the ranks of this host share the work, and all get the sums
    const auto num_segments = static_cast<int>((x.num_bytes() + kSegmentBytes - 1) / kSegmentBytes);
    auto segment = [&](int i) { return slice(x, piece_of(x.count, i, num_segments, kBorderAlign)); };
    auto part = [&](int i, int k) {
        const Buffer whole = segment(i);
        return slice(whole, k < lanes ? piece_of(whole.count, k, lanes, kBorderAlign) : Range{0, 0});
    };
    auto parts = [&](int i) {
        std::vector<Buffer> out;
        for (int k = 0; k < local_.size(); ++k) out.push_back(part(i, k));
        return out;
    };
    auto reduce_on_this_host = [&](int i) {
        if (!is_even) return local_.all_reduce(segment(i), sum, patience);
        local_.reduce_scatter_v(part(i, local_.rank()), parts(i), sum, patience);
    };
    auto reduce_between_hosts = [&](int i) {
        const Buffer own = part(i, local_.rank());
        flat_.all_reduce_among(has_part ? lane_ : std::vector<int>{rank()}, own, sum, timeout);
        if (op == ReduceOp::kMean) convert(own, own, 1.0 / size());
    };
    auto copy_on_this_host = [&](int i) {
        if (is_even) return local_.all_gather_v(parts(i), part(i, local_.rank()), patience);
        for (int k = 0; k < lanes; ++k) local_.broadcast(part(i, k), k, patience);
    };
    if (num_segments == 1) {
        reduce_on_this_host(0);
        reduce_between_hosts(0);
        return copy_on_this_host(0);
    }
    std::optional<Background> between;
    auto stop = [&](int cause, const std::string& why) {
        if (between.has_value()) between->stop();
        flat_.give_up(cause, why);  // ends what the thread waits for
    };
    try {
        between.emplace(num_segments, reduce_between_hosts);
        for (int i = 0; i <= num_segments; ++i) {
            if (i < num_segments) {
                reduce_on_this_host(i);
                between->allow(i);
            }
            if (i > 0) {
                between->await(i - 1, check_signals_);
                copy_on_this_host(i - 1);
            }
        }
    } catch (const CommFailure& error) {
        stop(error.peer, error.what());
        throw;
    } catch (...) {  // a signal, or there is no thread
        stop(-1, format("rank %d: all_reduce: it failed in the middle", rank()));
        throw;
    }
}

void HierarchicalGroup::reduce_on_host(const std::vector<Buffer>& parts, double timeout) {
    const Buffer& own = parts[static_cast<size_t>(local_.rank())];
    whole([&] {
        compare({.kind = Kind::kReduceScatterV, .dtype = own.dtype, .count = parts[0].count}, timeout);
        local_.reduce_scatter_v(own, parts, ReduceOp::kSum, local_patience(timeout));
    });
}

void HierarchicalGroup::reduce_scatter(const Buffer& out, const Buffer& x, ReduceOp op, double timeout) {
    if (out.num_bytes() <= kFlatBytes) return flat_.reduce_scatter(out, x, op, timeout);
    whole([&] {
        compare({.kind = Kind::kReduceScatter, .dtype = x.dtype, .op = op, .tag = x.tag, .count = x.count}, timeout);
        scatter(out, equal_parts(x, size()), op, timeout);
    });
}

void HierarchicalGroup::reduce_scatter_v(const Buffer& out, const std::vector<Buffer>& xs, ReduceOp op,
                                         double timeout) {
    whole([&] {
        const std::vector<Buffer> receives(xs.size(), out);
        compare_parts("reduce_scatter_v", {.kind = Kind::kReduceScatterV, .dtype = out.dtype, .op = op}, xs, receives,
                      timeout);
        scatter(out, xs, op, timeout);
    });
}

// Writes the reduction of all ranks' xs[rank] into `out`, which may be this rank's own.
void HierarchicalGroup::scatter(const Buffer& out, const std::vector<Buffer>& xs, ReduceOp op, double timeout) {
    if (widens(out, op)) {
        int64_t count = 0;
        for (const Buffer& x : xs) count += x.count;
        std::vector<float> wide(static_cast<size_t>(count)), result(static_cast<size_t>(out.count));
        std::vector<Buffer> arrays;
        for (int64_t at = 0; const Buffer& x : xs) {
            arrays.push_back({wide.data() + at, x.count, DType::kF32});
            if (x.count > 0) convert(arrays.back(), x, 1.0);
            at += x.count;
        }
        const Buffer array{result.data(), out.count, DType::kF32};
        scatter(array, arrays, op, timeout);
        return convert(out, array, 1.0);
    }
    const ReduceOp sum = without_mean(op);
    std::vector<Joined> runs;
    std::vector<Buffer> wholes;
    for (const std::vector<int>& ranks : carried_) {
        runs.emplace_back(xs, ranks, out.dtype);
        const std::vector<Buffer> places = runs.back().places(xs, ranks);
        for (size_t i = 0; i < ranks.size(); ++i) copy_apart(places[i], xs[static_cast<size_t>(ranks[i])]);
        wholes.push_back(runs.back().whole());
    }
    const auto own = static_cast<size_t>(local_.rank());
    const std::vector<int>& mine = carried_[own];
    std::vector<char> sums(static_cast<size_t>(wholes[own].num_bytes()));
    const Buffer of_host{sums.data(), wholes[own].count, out.dtype};
    local_.reduce_scatter_v(of_host, wholes, sum, local_patience(timeout));

    const auto num_terms = carriers_.size() + 1;
    std::vector<char> stage(carriers_.size() * static_cast<size_t>(out.num_bytes()));
    std::vector<Buffer> received(static_cast<size_t>(size())), sent(static_cast<size_t>(size()));
    for (int64_t at = 0, i = 0; const Buffer& x : runs[own].places(xs, mine)) {
        sent[static_cast<size_t>(mine[static_cast<size_t>(i++)])] = slice(of_host, {at, at + x.count});
        at += x.count;
    }
    for (size_t i = 0; i < carriers_.size(); ++i) {
        received[static_cast<size_t>(carriers_[i])] = {stage.data() + i * static_cast<size_t>(out.num_bytes()),
                                                       out.count, out.dtype};
    }
    received[static_cast<size_t>(rank())] = sent[static_cast<size_t>(rank())];
    std::vector<int> in_order = carriers_;
    in_order.push_back(rank());
    std::sort(in_order.begin(), in_order.end());
    std::vector<const void*> terms;
    for (int p : in_order) terms.push_back(received[static_cast<size_t>(p)].data);
    exchange(received, sent, timeout);
    if (out.count == 0) return;
    void* const to = out.data;
    reduce_range(&to, 1, terms.data(), static_cast<int>(num_terms), out.dtype, sum, out.count);
    if (op == ReduceOp::kMean) convert(out, out, 1.0 / size());
}

void HierarchicalGroup::all_gather(const Buffer& out, const Buffer& x, double timeout) {
    if (x.num_bytes() <= kFlatBytes) return flat_.all_gather(out, x, timeout);
    whole([&] {
        compare({.kind = Kind::kAllGather, .dtype = x.dtype, .tag = x.tag, .count = x.count}, timeout);
        gather(equal_parts(out, size()), x, timeout);
    });
}

void HierarchicalGroup::all_gather_v(const std::vector<Buffer>& outs, const Buffer& x, double timeout) {
    whole([&] {
        const std::vector<Buffer> sends(outs.size(), x);
        compare_parts("all_gather_v", {.kind = Kind::kAllToAllV}, sends, outs, timeout);
        gather(outs, x, timeout);
    });
}

// Writes the x of every rank p into outs[p], which may be this rank's own.
void HierarchicalGroup::gather(const std::vector<Buffer>& outs, const Buffer& x, double timeout) {
    std::vector<Buffer> targets;  // bytes, as dtypes may differ
    for (const Buffer& out : outs) targets.push_back({out.data, out.num_bytes(), DType::kU8});
    copy_apart(targets[static_cast<size_t>(rank())], {x.data, x.num_bytes(), DType::kU8});
    const auto own = static_cast<size_t>(local_.rank());
    std::vector<Buffer> received(static_cast<size_t>(size())), sent(static_cast<size_t>(size()));
    for (int p : carried_[own]) received[static_cast<size_t>(p)] = targets[static_cast<size_t>(p)];
    for (int p : carriers_) sent[static_cast<size_t>(p)] = {x.data, x.num_bytes(), DType::kU8};
    exchange(received, sent, timeout);
    std::vector<Joined> runs;
    std::vector<Buffer> wholes;
    for (const std::vector<int>& ranks : carried_) {
        runs.emplace_back(targets, ranks, DType::kU8);
        wholes.push_back(runs.back().whole());
    }
    const std::vector<Buffer> own_places = runs[own].places(targets, carried_[own]);
    for (size_t i = 0; i < own_places.size(); ++i) {
        copy_apart(own_places[i], targets[static_cast<size_t>(carried_[own][i])]);
    }
    local_.all_gather_v(wholes, wholes[own], local_patience(timeout));
    for (size_t k = 0; k < runs.size(); ++k) {
        if (!runs[k].is_copy()) continue;
        const std::vector<Buffer> places = runs[k].places(targets, carried_[k]);
        for (size_t i = 0; i < places.size(); ++i) copy_apart(targets[static_cast<size_t>(carried_[k][i])], places[i]);
    }
}

// Sends sent[p] to rank p, and receives received[p] from it; only of ranks on other hosts.
void HierarchicalGroup::exchange(const std::vector<Buffer>& received, const std::vector<Buffer>& sent, double timeout) {
    std::vector<Buffer> outs(received.size()), xs(sent.size());
    for (int p = 0; p < size(); ++p) {
        if (is_here(p)) continue;
        outs[static_cast<size_t>(p)] = received[static_cast<size_t>(p)];
        xs[static_cast<size_t>(p)] = sent[static_cast<size_t>(p)];
    }
    flat_.all_to_all_v(outs, xs, timeout);
}

void HierarchicalGroup::broadcast(const Buffer& x, int root, double timeout) {
    if (x.num_bytes() <= kFlatBytes) return flat_.broadcast(x, root, timeout);
    whole([&] {
        compare({.kind = Kind::kBroadcast, .dtype = x.dtype, .tag = x.tag, .root = root, .count = x.count}, timeout);
        std::vector<int> heads;  // one of each host
        int head = 0;            // of this one
        for (size_t host = 0; host < hosts_.size(); ++host) {
            const std::vector<int>& members = hosts_[host];
            const bool has_root = std::find(members.begin(), members.end(), root) != members.end();
            heads.push_back(has_root ? root : members[0]);
            if (host == host_) head = heads.back();
        }
        std::sort(heads.begin(), heads.end());
        flat_.broadcast_among(head == rank() ? heads : std::vector<int>{rank()}, x, root, timeout);
        const auto at = std::find(hosts_[host_].begin(), hosts_[host_].end(), head) - hosts_[host_].begin();
        local_.broadcast(x, static_cast<int>(at), local_patience(timeout));
    });
}

void HierarchicalGroup::run(const NamedProgram& program, const Buffer& x, ReduceOp op, double timeout) {
    flat_.run(program, x, op, timeout);
}

void HierarchicalGroup::reduce(const Buffer& x, int root, ReduceOp op, double timeout) {
    flat_.reduce(x, root, op, timeout);
}

void HierarchicalGroup::all_to_all(const Buffer& out, const Buffer& x, double timeout) {
    flat_.all_to_all(out, x, timeout);
}

void HierarchicalGroup::all_to_all_v(const std::vector<Buffer>& outs, const std::vector<Buffer>& xs, double timeout) {
    flat_.all_to_all_v(outs, xs, timeout);
}

}  // namespace pycomm
