// Arguments of the methods of groups, checked. What is wrong with them is announced to the other ranks, then thrown.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/collectives.h"
#include "transport/group.h"

namespace pycomm {

// Returns the result of `look`, which checks arguments.
template <class Look>
auto look_at(Group& group, double timeout, Look&& look) {
    try {
        return look();
    } catch (const std::exception& error) {
        std::string reason = error.what();  // with the interpreter's lock, which it may need
        py::gil_scoped_release release;
        group.refuse(reason, timeout);
        throw;
    }
}

std::pair<Array, ReduceOp> look_at_reduction(Group& group, py::handle x, py::handle op_name, double timeout);

// While it lives, this thread holds the interpreter's lock until it waits: letting go of it takes longer than most
// small operations wait.
class HeldUntilWait {
   public:
    HeldUntilWait() : outer_(current) { current = this; }
    ~HeldUntilWait() { current = outer_; }
    HeldUntilWait(const HeldUntilWait&) = delete;
    HeldUntilWait& operator=(const HeldUntilWait&) = delete;

    static void let_go() {
        if (current != nullptr && !current->released_) current->released_.emplace();
    }

   private:
    static thread_local HeldUntilWait* current;
    HeldUntilWait* outer_;  // of the operation whose wait runs the signal handler that calls this one
    std::optional<py::gil_scoped_release> released_;
};

}  // namespace pycomm
