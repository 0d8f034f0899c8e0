#include "transport/tcp/run.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "kernels/reduce.h"
#include "transport/convert.h"

namespace pycomm {
namespace {

constexpr int64_t kRunPieceBytes = 128 << 10;

// One program under way.
class TcpRun {
   public:
    TcpRun(TcpCall& call, const Program& program, const Buffer& x, ReduceOp op)
        : call_(call),
          program_(program),
          x_(x),
          width_(size_of(x.dtype)),
          piece_(kRunPieceBytes / width_),
          // A mean is summed here, and divided at the end.
          op_(op == ReduceOp::kMean ? ReduceOp::kSum : op),
          stage_(call.scratch(kRunPieceBytes)),
          leaves_from_(program.sends.size()) {}

    void finish() {
        while (!done()) {
            const bool moved = send_ready() ? (send(), true) : false;
            if (!receive_some() && !moved && !done()) call_.move();
        }
        call_.finish();
    }

   private:
    static size_t index(int64_t i) { return static_cast<size_t>(i); }
    int64_t num_sends() const { return static_cast<int64_t>(program_.sends.size()); }
    int64_t num_receives() const { return static_cast<int64_t>(program_.receives.size()); }
    bool done() const { return sent_ == num_sends() && received_ == num_receives(); }

    template <class Message>
    Range elements(const Message& message) const {
        return {program_.border(message.chunk, x_.count), program_.border(message.chunk + message.count, x_.count)};
    }
    // Next piece of a message of which `done_elements` have moved.
    Range next_piece(Range whole, int64_t done_elements) const {
        const int64_t begin = whole.begin + done_elements;
        return {begin, std::min(whole.end, begin + piece_)};
    }
    static bool reaches(Range whole, int64_t done_elements, Range piece) {
        return whole.begin + done_elements >= std::min(piece.end, whole.end) || piece.end <= whole.begin;
    }

    // Whether the first n receives are done, the last of them as far as it concerns `piece`.
    bool has_received(int64_t n, Range piece) const {
        if (received_ >= n) return true;
        return received_ == n - 1 && reaches(elements(program_.receives[index(n - 1)]), received_elements_, piece);
    }
    // Whether the first n sends have left, the last of them as far as it concerns `piece`.
    bool has_left(int64_t n, Range piece) {
        while (left_ < sent_ && left_elements(left_) == elements(program_.sends[index(left_)]).size()) ++left_;
        if (left_ >= n) return true;
        if (left_ != n - 1 || left_ > sent_) return false;
        const int64_t elements_left = left_ < sent_ || sent_elements_ > 0 ? left_elements(left_) : 0;
        return reaches(elements(program_.sends[index(left_)]), elements_left, piece);
    }
    // Whole elements of a message, queued in part at least, that have left.
    int64_t left_elements(int64_t i) const {
        const Send& message = program_.sends[index(i)];
        const int64_t bytes = call_.link(message.peer).num_left() - leaves_from_[index(i)];
        const int64_t most = i < sent_ ? elements(message).size() : sent_elements_;
        return std::clamp<int64_t>(bytes / width_, 0, most);
    }

    bool send_ready() const {
        if (sent_ == num_sends()) return false;
        const Send& message = program_.sends[index(sent_)];
        return has_received(message.after_received, next_piece(elements(message), sent_elements_));
    }
    void send() {
        const Send& message = program_.sends[index(sent_)];
        const Range whole = elements(message), piece = next_piece(whole, sent_elements_);
        Link& link = call_.link(message.peer);
        if (sent_elements_ == 0) leaves_from_[index(sent_)] = link.num_left() + link.unsent();
        link.send(at(piece.begin), piece.size() * width_);
        sent_elements_ += piece.size();
        if (sent_elements_ < whole.size()) return;
        ++sent_;
        sent_elements_ = 0;
    }

    // Returns whether the present receive came any further.
    bool receive_some() {
        if (received_ == num_receives()) return false;
        const Receive& message = program_.receives[index(received_)];
        const Range whole = elements(message), piece = next_piece(whole, received_elements_);
        Link& link = call_.link(message.peer);
        const int64_t after = std::max(message.after_sent, message.after_taken);
        if (!is_under_way_ && piece.size() > 0) {
            is_staged_ = message.reduces || !has_left(after, piece);
            link.receive(is_staged_ ? stage_ : at(piece.begin), piece.size() * width_);
            is_under_way_ = true;
            link.move();
        }
        if (is_under_way_ && link.is_receiving()) return false;
        if (is_under_way_ && is_staged_) {
            if (!has_left(after, piece)) return false;
            take(message, piece);
        }
        is_under_way_ = false;
        received_elements_ += piece.size();
        if (received_elements_ == whole.size()) {
            ++received_;
            received_elements_ = 0;
        }
        return true;
    }

    void take(const Receive& message, Range piece) {
        void* mine = at(piece.begin);
        if (!message.reduces) {
            std::memcpy(mine, stage_, static_cast<size_t>(piece.size() * width_));
            return;
        }
        // Operands in rank order: partners that exchange sums get the same bits, also for zeros and NaNs.
        const void* operands[2] = {mine, stage_};
        if (message.peer < call_.rank()) std::swap(operands[0], operands[1]);
        reduce_range(&mine, 1, operands, 2, x_.dtype, op_, piece.size());
    }

    char* at(int64_t element) const { return x_.bytes() + element * width_; }

    TcpCall& call_;
    const Program& program_;
    const Buffer& x_;
    const int64_t width_, piece_;
    const ReduceOp op_;
    char* const stage_;
    std::vector<int64_t> leaves_from_;      // by message: bytes that leave its link before it
    int64_t sent_ = 0, sent_elements_ = 0;  // messages queued, and elements of the next one
    int64_t left_ = 0;                      // messages that have left, and all before them
    int64_t received_ = 0, received_elements_ = 0;
    bool is_under_way_ = false, is_staged_ = false;  // the next piece to be received
};

}  // namespace

void run_over_tcp(TcpCall& call, const Program& program, const Buffer& x, ReduceOp op) {
    if (op != ReduceOp::kMean) return TcpRun(call, program, x, op).finish();
    const bool widens = size_of(x.dtype) == 2;  // the sum may not fit into a half
    std::vector<char> wide(widens ? static_cast<size_t>(x.count * size_of(DType::kF32)) : 0);
    const Buffer array = widens ? Buffer{wide.data(), x.count, DType::kF32} : x;
    if (widens) convert(array, x, 1.0);
    TcpRun(call, program, array, op).finish();
    convert(x, array, 1.0 / call.num_members());
}

void TcpGroup::run(const NamedProgram& named, const Buffer& x, ReduceOp op, double timeout) {
    std::vector<int> all(static_cast<size_t>(size_));
    std::iota(all.begin(), all.end(), 0);
    TcpCall call(*this, "all_reduce", timeout, std::move(all));
    call.begin({.kind = Kind::kProgram, .dtype = x.dtype, .op = op, .count = x.count, .schedule = named.digest},
               named.name.data(), static_cast<uint32_t>(std::min<size_t>(named.name.size(), 63)));
    if (call.num_members() > 1) run_over_tcp(call, named.program, x, op);
}

}  // namespace pycomm
