// Forks of the process (for a DataLoader worker, say): the child must neither write to memory that its parent's peers
// read, nor keep a connection open whose end they wait for.
#pragma once

namespace pycomm {

class ForkAware {
   public:
    // Around the fork, in the thread that forks. What before_fork() locks, the other two unlock. In the child there is
    // no other thread.
    virtual void before_fork() = 0;
    virtual void after_fork_in_parent() = 0;
    virtual void after_fork_in_child() = 0;

   protected:
    ~ForkAware() = default;
};

// From the first to the second `object` is told of every fork. Neither may be called with a lock that it takes itself.
void watch_forks(ForkAware* object);
void unwatch_forks(ForkAware* object);

}  // namespace pycomm
