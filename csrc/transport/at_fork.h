// Forks of the process (for a DataLoader worker, say). The child must not write to memory that its parent's peers read,
// and must close its copies of the connections: peers recognize a rank's death by its closed connection.
#pragma once

namespace pycomm {

class ForkAware {
   public:
    // Called around the fork, in the thread that forks. What before_fork() locks, the other two unlock. In the child
    // there is no other thread.
    virtual void before_fork() = 0;
    virtual void after_fork_in_parent() = 0;
    virtual void after_fork_in_child() = 0;

   protected:
    ~ForkAware() = default;
};

// Begin and end these calls for `object`. Do not hold a lock that before_fork() takes when you call them.
void watch_forks(ForkAware* object);
void unwatch_forks(ForkAware* object);

}  // namespace pycomm
