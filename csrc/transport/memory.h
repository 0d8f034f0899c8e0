// One rank's shared memory: an anonymous file, mapped by every rank of the group.
//
//   | control | mailboxes | staging | arena ... |
//
// The file has no name, so nothing is left behind when its last holder dies, and no /dev/shm limit applies. Its pages
// are reserved (posix_fallocate) before use: a shortage is an error here and not a SIGBUS somewhere else. The address
// range is much larger than what is ever reserved, so that an arena grows without telling the peers.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace pycomm {

class Mapping {
   public:
    Mapping(int fd, int64_t num_bytes);  // does not own fd
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    char* data() const { return data_; }
    int64_t num_bytes() const { return num_bytes_; }

   private:
    char* data_;
    int64_t num_bytes_;
};

// Bytes of memory this process may still use, as far as the kernel and its control group say.
int64_t available_memory();

// The allocator of this rank's own file. Blocks may outlive the group: they keep the mapping.
class Arena : public std::enable_shared_from_this<Arena> {
   public:
    // Bytes [0, begin) are reserved at once and never handed out. Owns fd.
    Arena(int fd, int64_t num_bytes, int64_t begin);
    ~Arena();

    // Page-aligned block of at least one page. Throws OutOfMemory saying what was needed and found.
    char* allocate(int64_t num_bytes);
    void release(char* block);

    // Offset of [pointer, pointer + num_bytes) in the file, or -1 if it does not lie in the arena.
    int64_t offset_of(const void* pointer, int64_t num_bytes) const;

    char* data() const { return mapping_.data(); }

   private:
    void reserve(int64_t end, int64_t wanted);

    int fd_;
    Mapping mapping_;
    std::mutex mutex_;
    std::map<int64_t, int64_t> free_;  // offset -> bytes, no two adjacent
    std::map<int64_t, int64_t> used_;
    int64_t reserved_ = 0;  // bytes [0, reserved_) have their pages
};

}  // namespace pycomm
