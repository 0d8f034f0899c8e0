// The one background thread of a process with groups between hosts. It reads and writes their control connections, and
// calls each group once a second; it never needs the interpreter's lock. It lives as long as any connection is watched.
#pragma once

#include <cstdint>

namespace pycomm {

class WatchedSockets {
   public:
    // The socket number `index` of this object can be read or written.
    virtual void on_ready(int index) = 0;
    // About once a second.
    virtual void on_tick() = 0;

   protected:
    ~WatchedSockets() = default;
};

// Adds a socket. An object is called by one thread at a time.
void watch(WatchedSockets* object, int index, int socket);
// Says whether the object must also know when the socket can be written. From any thread.
void watch_for_room(int socket, bool wanted);
// Removes an object, and its sockets before they are closed. It is not called any more once this has returned. Do not
// hold a lock that the object takes when it is called.
void unwatch(WatchedSockets* object);

}  // namespace pycomm
