// Runs programs over shared memory.
//
// Nothing is sent: the receiver reads a message from the sender's memory and adds it to its own in the same pass. The
// sender only says how far it may read. Where the sender's chunks lie:
//   in place     in x itself, if x is in the arena and no message of the same round changes them.
//   the shadow   otherwise: an array in the arena as long as x, to which the sender copies them first.
// Messages move in segments, so that a chunk is passed on before its end has arrived, and while it is still in a cache.
// Each rank handles its sends in order, and its receives in order; sends and receives wait for each other only where
// one changes what the other reads.
//
// It cannot deadlock. Of all messages that are not done, take the first one in the table: all messages that its two
// ranks handle before it are done. Its sender waits only for receives of earlier rounds and for earlier messages to be
// taken, all of which is done. Its receiver waits for messages of earlier rounds to be taken, which is done, and for
// its own messages of this round to be copied to the shadow. Those copies wait only for receives of earlier rounds and
// for messages of earlier rounds to be taken. So the message can move.
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

#include "base/error.h"
#include "base/parallel.h"
#include "kernels/reduce.h"
#include "transport/convert.h"
#include "transport/program.h"
#include "transport/shared_memory/call.h"

namespace pycomm {
namespace {

// Half of a small second-level cache: two ranks' segments and the result stay there.
constexpr int64_t kPieceBytes = 128 << 10;

// Memory of this rank that the others reach.
class Block {
   public:
    Block(std::shared_ptr<Arena> arena, int64_t num_bytes)
        : arena_(std::move(arena)), data_(num_bytes > 0 ? arena_->allocate(num_bytes) : nullptr) {}
    ~Block() {
        if (data_ != nullptr) arena_->release(data_);
    }
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    char* data() const { return data_; }
    int64_t offset() const { return data_ != nullptr ? data_ - arena_->data() : -1; }

   private:
    std::shared_ptr<Arena> arena_;
    char* data_;
};

// Memory of a run, all of it reserved before the operation is announced. The summed array is x or, for means of half
// types, a float copy of x: their sums may not fit into a half.
struct Working {
    Working(const SharedMemoryGroup& group, const Program& program, const Buffer& x, ReduceOp op)
        : widens(op == ReduceOp::kMean && size_of(x.dtype) == 2),
          wide(group.arena(), widens ? x.count * size_of(DType::kF32) : 0),
          array(widens ? Buffer{wide.data(), x.count, DType::kF32} : x),
          offset(group.offset_of(array)),
          shadow(group.arena(),
                 !program.sends.empty() && (offset < 0 || program.has_conflicts()) ? array.num_bytes() : 0),
          posted_until(program.sends.size()) {}

    const bool widens;
    const Block wide;
    const Buffer array;
    const int64_t offset;  // in the arena
    const Block shadow;
    std::vector<uint32_t> posted_until;  // by message: its channel's count when all of it was posted
};

// One program under way. A position is a message and the elements of it that are done.
class Run {
   public:
    Run(Call& call, const Program& program, Working& working, ReduceOp op)
        : call_(call),
          program_(program),
          x_(working.array),
          width_(size_of(x_.dtype)),
          piece_(kPieceBytes / width_),
          // A mean is summed here, and divided at the end.
          op_(op == ReduceOp::kMean ? ReduceOp::kSum : op),
          shadow_(working.shadow.data()),
          in_arena_(working.offset >= 0),
          posted_until_(working.posted_until) {}

    void finish() {
        while (!done()) {
            retire();
            bool moved = send_ready() && (send(), true);
            // Sends in place cost nothing: all that are ready are posted before this rank receives anything.
            while (moved && !copies(sending()) && send_ready()) send();
            if (receive_ready()) {
                receive();
            } else if (!moved && !done()) {
                call_.await_messages([this] { return awaited_peer(); }, [this] { return done() || any_ready(); });
            }
        }
    }

   private:
    const Send* sending() const { return sent_ < num_sends() ? &program_.sends[index(sent_)] : nullptr; }
    const Receive* receiving() const {
        return received_ < num_receives() ? &program_.receives[index(received_)] : nullptr;
    }
    static size_t index(int64_t i) { return static_cast<size_t>(i); }
    int64_t num_sends() const { return static_cast<int64_t>(program_.sends.size()); }
    int64_t num_receives() const { return static_cast<int64_t>(program_.receives.size()); }
    bool done() const { return retired_ == num_sends() && received_ == num_receives(); }
    bool any_ready() const { return retire_ready() || send_ready() || receive_ready(); }

    template <class Message>
    Range elements(const Message& message) const {
        return {program_.border(message.chunk, x_.count), program_.border(message.chunk + message.count, x_.count)};
    }
    // Next piece of a message of which `done_elements` have moved.
    Range next_piece(Range whole, int64_t done_elements) const {
        int64_t begin = whole.begin + done_elements;
        return {begin, std::min(whole.end, begin + piece_)};
    }

    bool copies(const Send* message) const { return message != nullptr && (message->conflict || !in_arena_); }

    bool send_ready() const {
        const Send* message = sending();
        if (message == nullptr) return false;
        Range piece = next_piece(elements(*message), sent_elements_);
        if (!has_received(message->after_received, piece)) return false;
        return !copies(message) || !message->fresh || retired_ >= message->after_taken;
    }

    // Whether the first n receives are done, the last of them as far as it concerns `piece`.
    bool has_received(int64_t n, Range piece) const {
        if (received_ >= n) return true;
        return received_ == n - 1 && reaches(elements(program_.receives[index(n - 1)]), received_elements_, piece);
    }
    bool has_sent(int64_t n, Range piece) const {
        if (sent_ >= n) return true;
        return sent_ == n - 1 && reaches(elements(program_.sends[index(n - 1)]), sent_elements_, piece);
    }
    static bool reaches(Range whole, int64_t done_elements, Range piece) {
        return whole.begin + done_elements >= std::min(piece.end, whole.end) || piece.end <= whole.begin;
    }

    void send() {
        const Send& message = *sending();
        Range whole = elements(message), piece = next_piece(whole, sent_elements_);
        if (piece.size() > 0) {
            if (copies(&message) && message.fresh) {
                std::memcpy(shadow_ + piece.begin * width_, at(piece.begin), bytes_of(piece));
            }
            std::atomic<uint32_t>& posted = call_.channel(call_.rank(), message.peer).posted;
            posted.store(posted.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
            call_.ring(message.peer);
        }
        sent_elements_ += piece.size();
        if (sent_elements_ < whole.size()) return;
        posted_until_[index(sent_)] = call_.channel(call_.rank(), message.peer).posted.load(std::memory_order_relaxed);
        ++sent_;
        sent_elements_ = 0;
    }

    bool retire_ready() const {
        if (retired_ == sent_) return false;
        const Send& message = program_.sends[index(retired_)];
        return reached(call_.channel(message.peer, call_.rank()).taken, posted_until_[index(retired_)]);
    }
    void retire() {
        while (retire_ready()) ++retired_;
    }
    static bool reached(const std::atomic<uint32_t>& counter, uint32_t target) {
        return static_cast<int32_t>(counter.load(std::memory_order_seq_cst) - target) >= 0;
    }

    bool has_come(const Receive& message, Range piece) const {
        if (piece.size() == 0) return true;
        uint32_t taken = call_.channel(call_.rank(), message.peer).taken.load(std::memory_order_relaxed);
        return reached(call_.channel(message.peer, call_.rank()).posted, taken + 1);
    }
    bool receive_ready() const {
        const Receive* message = receiving();
        if (message == nullptr) return false;
        Range piece = next_piece(elements(*message), received_elements_);
        if (!has_come(*message, piece)) return false;
        if (in_arena_ && retired_ < message->after_taken) return false;
        return has_sent(message->after_sent, piece);
    }

    void receive() {
        const Receive& message = *receiving();
        Range whole = elements(message), piece = next_piece(whole, received_elements_);
        if (piece.size() > 0) {
            const Operation& announced = call_.announced(message.peer);
            bool from_shadow = message.from_shadow || announced.offset < 0;
            if (from_shadow && announced.shadow < 0) call_.distrust(message.peer);
            const char* theirs = from_shadow ? call_.shadow(message.peer) : call_.in_arena(message.peer);
            take(message, theirs + piece.begin * width_, piece);
            std::atomic<uint32_t>& taken = call_.channel(call_.rank(), message.peer).taken;
            taken.store(taken.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
            call_.ring(message.peer);
        }
        received_elements_ += piece.size();
        if (received_elements_ < whole.size()) return;
        ++received_;
        received_elements_ = 0;
    }

    void take(const Receive& message, const char* theirs, Range piece) {
        void* mine = at(piece.begin);
        if (!message.reduces) {
            std::memcpy(mine, theirs, bytes_of(piece));
            return;
        }
        // Operands in rank order: partners that exchange sums get the same bits, also for zeros and NaNs.
        const void* operands[2] = {mine, theirs};
        if (message.peer < call_.rank()) std::swap(operands[0], operands[1]);
        reduce_range(&mine, 1, operands, 2, x_.dtype, op_, piece.size());
    }

    char* at(int64_t element) const { return x_.bytes() + element * width_; }
    size_t bytes_of(Range piece) const { return static_cast<size_t>(piece.size() * width_); }

    // One of the ranks that this one waits for.
    int awaited_peer() const {
        const Receive* message = receiving();
        bool for_message =
            message != nullptr && !has_come(*message, next_piece(elements(*message), received_elements_));
        return for_message || retired_ == sent_ ? message->peer : program_.sends[index(retired_)].peer;
    }

    Call& call_;
    const Program& program_;
    const Buffer& x_;
    const int64_t width_, piece_;
    const ReduceOp op_;
    char* const shadow_;
    const bool in_arena_;
    std::vector<uint32_t>& posted_until_;
    int64_t sent_ = 0, sent_elements_ = 0;          // messages posted, and elements of the next one
    int64_t received_ = 0, received_elements_ = 0;  // likewise
    int64_t retired_ = 0;                           // messages that their receivers have taken
};

}  // namespace

void SharedMemoryGroup::run(const NamedProgram& named, const Buffer& x, ReduceOp op, double timeout) {
    std::optional<Working> working;  // outlives the call, until whose end peers may read it
    Call call(*this, "all_reduce", timeout);
    try {
        working.emplace(*this, named.program, x, op);
    } catch (const std::exception& shortage) {
        call.refuse(shortage.what());
        throw;
    }
    const Buffer& array = working->array;
    call.name_algorithm(named.name);
    call.announce({.kind = Kind::kProgram,
                   .dtype = x.dtype,
                   .op = op,
                   .count = x.count,
                   .schedule = named.digest,
                   .offset = working->offset,
                   .shadow = working->shadow.offset()});
    if (working->widens) convert(array, x, 1.0);
    call.begin_messages();
    Run(call, named.program, *working, op).finish();
    call.end_messages();
    if (op == ReduceOp::kMean) convert(x, array, 1.0 / size_);
}

}  // namespace pycomm
