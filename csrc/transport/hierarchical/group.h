// Collectives among ranks of several hosts, some of which share a host: shared memory within hosts, TCP between them,
// so that a link between hosts carries each byte once instead of once per rank.
//
// An all-reduce has three steps, with as many lanes as the smallest host has ranks:
//   1. the ranks of a host reduce-scatter; lane k's rank gets part k;
//   2. lane k's ranks of all hosts all-reduce part k over TCP;
//   3. the ranks of a host all-gather the parts.
// Large arrays are cut into segments: while a thread has one in step 2, this one does steps 1 and 3 of its neighbors.
//
// In collectives of parts of any lengths, one per rank, rank p exchanges data with another host through one rank there,
// its carrier. The carrier has the same index on its host as p on its own, modulo the number of ranks there. So a link
// between two hosts carries each part once, and all ranks of a host share the work. Parts that a rank carries need no
// copy if they are adjacent: if hosts have equally many ranks, and the parts the order of order_of() in rendezvous.py.
//
// Small arrays and rare operations go over TCP between all ranks. Before the others, all ranks compare what they are
// about to do.
#pragma once

#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "transport/group.h"
#include "transport/operation.h"
#include "transport/shared_memory/group.h"
#include "transport/tcp/group.h"

namespace pycomm {

class HierarchicalGroup final : public Group {
   public:
    // flat: all ranks. local: this host's ranks, in rising order. hosts: ranks by host. Both groups must outlive this
    // one, which closes them. check_signals(): as for the two groups.
    HierarchicalGroup(TcpGroup& flat, SharedMemoryGroup& local, std::vector<std::vector<int>> hosts,
                      std::function<void()> check_signals);

    int rank() const override { return flat_.rank(); }
    int size() const override { return flat_.size(); }

    void all_reduce(const Buffer& x, ReduceOp op, double timeout) override;
    void reduce_scatter(const Buffer& out, const Buffer& x, ReduceOp op, double timeout) override;
    void all_gather(const Buffer& out, const Buffer& x, double timeout) override;
    void all_gather_v(const std::vector<Buffer>& outs, const Buffer& x, double timeout) override;
    void reduce_scatter_v(const Buffer& out, const std::vector<Buffer>& xs, ReduceOp op, double timeout) override;
    void broadcast(const Buffer& x, int root, double timeout) override;
    // Makes parts[k] of each host's k-th rank the sum over its ranks; hosts have equally many. The parts, of equal
    // lengths on all ranks, have one dtype.
    void reduce_on_host(const std::vector<Buffer>& parts, double timeout);

    void run(const NamedProgram& program, const Buffer& x, ReduceOp op, double timeout) override;
    void reduce(const Buffer& x, int root, ReduceOp op, double timeout) override;
    void all_to_all(const Buffer& out, const Buffer& x, double timeout) override;
    void all_to_all_v(const std::vector<Buffer>& outs, const std::vector<Buffer>& xs, double timeout) override;
    void barrier(double timeout) override { flat_.barrier(timeout); }
    void refuse(const std::string& reason, double timeout) override { flat_.refuse(reason, timeout); }

    void send(const Buffer& x, int64_t width, int dst, int64_t tag, double timeout) override {
        flat_.send(x, width, dst, tag, timeout);
    }
    std::unique_ptr<PostedReceive> post_receive(const Buffer& x, int64_t width, int src, int64_t tag,
                                                std::shared_ptr<void> keeper) override {
        return flat_.post_receive(x, width, src, tag, std::move(keeper));
    }
    int64_t buffer_limit() override { return flat_.buffer_limit(); }
    void set_buffer_limit(int64_t num_bytes) override { flat_.set_buffer_limit(num_bytes); }
    int64_t buffered_bytes() override { return flat_.buffered_bytes(); }

    enum class Skip : uint8_t { kNothing, kAfterTheNext, kAll };
    // Which comparisons are left out, as earlier ones imply them.
    void skip_comparisons(Skip which) { skip_ = which; }
    // See SharedMemoryGroup.
    void give_up_stopped_after(double seconds) { stopped_patience_ = seconds; }
    void close(const std::string& why) override;

   private:
    template <class Run>
    void whole(Run&& operation);
    void compare(const Operation& operation, double timeout);
    void compare_parts(const char* name, const Operation& operation, const std::vector<Buffer>& sends,
                       const std::vector<Buffer>& receives, double timeout);
    double local_patience(double timeout);
    void all_reduce_segments(const Buffer& x, ReduceOp op, double timeout);
    void scatter(const Buffer& out, const std::vector<Buffer>& xs, ReduceOp op, double timeout);
    void gather(const std::vector<Buffer>& outs, const Buffer& x, double timeout);
    void exchange(const std::vector<Buffer>& received, const std::vector<Buffer>& sent, double timeout);
    bool is_here(int p) const;

    TcpGroup& flat_;
    SharedMemoryGroup& local_;
    const std::vector<std::vector<int>> hosts_;
    const std::function<void()> check_signals_;
    size_t host_ = 0;  // of this rank
    int num_lanes_;
    std::vector<int> lane_;                  // the ranks of this rank's lane; alone if it has none
    std::vector<std::vector<int>> carried_;  // the ranks whose parts each rank of this host carries, by its index
    std::vector<int> carriers_;              // the ranks of the other hosts that carry this rank's part
    std::atomic<Skip> skip_{Skip::kNothing};
    std::atomic<double> stopped_patience_{std::numeric_limits<double>::infinity()};
};

}  // namespace pycomm
