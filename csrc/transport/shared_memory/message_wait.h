// One thread's wait in Messages: for a message, or for room to send one. It fails if that can no longer come.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "transport/shared_memory/messages.h"

namespace pycomm {

class MessageWait {
   public:
    MessageWait(Messages& messages, const char* name, double timeout);
    ~MessageWait();
    MessageWait(const MessageWait&) = delete;
    MessageWait& operator=(const MessageWait&) = delete;

    // All of these throw CommFailure, and what signal handlers throw.

    // Throws if this rank has given up or is closing.
    void require_usable() const;
    // Throws if rank p has given up or died. Looks at its process only from time to time.
    void require_present(int p);
    // Returns once `cost` bytes are reserved.
    void for_room(int dst, int64_t cost);
    // Returns once the receipt is finished; it is given up if no message can come for it any more.
    void for_message(const ReceiptPtr& receipt);
    // Gives the receipt up if no message can come for it any more. Does not wait, and throws none of these errors.
    void give_up_if_hopeless(const ReceiptPtr& receipt, double waited);

   private:
    struct Gone {
        int peer;  // the rank that failed
        std::string what;
    };

    int rank() const { return messages_.group_.rank_; }
    int size() const { return messages_.group_.size_; }
    Control& control(int p) const { return messages_.group_.control(p); }
    std::optional<Gone> gone(int p) const;
    std::optional<Gone> ended(int p) const;
    bool died(int p) const;
    // The error for a rank that is gone. Also publishes it, so that peers of this rank report the same cause.
    [[nodiscard]] CommFailure loss(const Gone& gone, double waited) const;
    std::optional<Gone> all_gone(int src) const;
    void begin(int peer);
    void let_signals_through() const;
    bool would_wait_for_ever(int dst);
    std::string what_is_buffered() const;
    std::string stopped(int p) const;
    [[nodiscard]] CommFailure failure(int peer, double waited, const std::string& what) const;

    Messages& messages_;
    const char* name_;
    double timeout_;
    std::optional<int> peer_;  // the peer published for this wait
    double next_look_;
    std::vector<uint32_t> seen_, looks_;  // of the ranks that wait for one another, at the last look
};

}  // namespace pycomm
