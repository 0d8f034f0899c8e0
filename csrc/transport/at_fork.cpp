#include "transport/at_fork.h"

#include <pthread.h>

#include <mutex>
#include <set>

namespace pycomm {
namespace {

class Registry {
   public:
    static Registry& instance() {
        static Registry* registry = new Registry;  // never destroyed: groups may outlive static destruction
        return *registry;
    }

    std::mutex mutex;  // held across a fork
    std::set<ForkAware*> objects;

   private:
    Registry() {
        pthread_atfork(
            [] {
                instance().mutex.lock();
                for (ForkAware* object : instance().objects) object->before_fork();
            },
            [] {
                for (ForkAware* object : instance().objects) object->after_fork_in_parent();
                instance().mutex.unlock();
            },
            [] {
                for (ForkAware* object : instance().objects) object->after_fork_in_child();
                instance().mutex.unlock();
            });
    }
};

}  // namespace

void watch_forks(ForkAware* object) {
    std::lock_guard<std::mutex> lock(Registry::instance().mutex);
    Registry::instance().objects.insert(object);
}

void unwatch_forks(ForkAware* object) {
    std::lock_guard<std::mutex> lock(Registry::instance().mutex);
    Registry::instance().objects.erase(object);
}

}  // namespace pycomm
